"""What training minimises: a loss of the last hidden states, in slices of tokens, and its gradients."""
