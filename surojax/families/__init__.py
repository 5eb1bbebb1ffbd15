"""Families of models: a file for each with all that is particular to it, and a row for each in registry.py."""
