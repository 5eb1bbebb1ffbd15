"""Import and export of models in other formats: settings, names of tensors, and files."""
