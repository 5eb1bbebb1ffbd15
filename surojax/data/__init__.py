"""Text files to token arrays, and token arrays to batches."""
