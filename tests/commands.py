"""The modules of verbs whose names in `surojax` are functions."""

import importlib

convert = importlib.import_module("surojax.convert")
distill = importlib.import_module("surojax.distill")
evaluate = importlib.import_module("surojax.evaluate")
fit = importlib.import_module("surojax.fit")
generate = importlib.import_module("surojax.generate")
plan = importlib.import_module("surojax.plan")
train = importlib.import_module("surojax.train")
