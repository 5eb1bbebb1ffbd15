"""Before there is a GPU: memory, traffic and time of a run."""
