"""Kinds of mixers and MLPs: a class for each, with its parameters, its function, and what others ask about it."""
