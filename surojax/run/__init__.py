"""The output of a run: checkpoints and metrics."""
