"""Runs of many processes: how each finds its place, how all connect, and how they end together."""
