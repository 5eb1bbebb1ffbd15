"""Assembles the parts of a run from a config, before any array exists."""
