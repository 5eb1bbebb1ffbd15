"""Optimizers: update rules for each kind of tensor."""
