"""Models in other formats: their settings, names and files."""
