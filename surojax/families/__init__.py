"""Families of models: one file for each family's peculiarities, and one row for each family in registry.py."""
