"""Checks of this machine's GPU, disk and memory, each with a verdict."""
