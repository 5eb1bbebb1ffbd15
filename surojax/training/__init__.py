"""The parts of a training run; `surojax.train` puts them in order."""
