"""One optimizer step: forward and backward, reduction of gradients, update."""
