"""What a run leaves behind: checkpoints and metrics."""
