"""GPU kernels in Pallas (Mosaic GPU) for training: imports jax only, usable without surojax. None is built yet."""
