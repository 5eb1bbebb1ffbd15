"""What this machine does: checks that need its GPU, disk and memory, each with a verdict."""
