"""The settings that do not go together: a table of pairs of features, each with its reason and the change."""
