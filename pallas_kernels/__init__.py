"""GPU kernels in Pallas (Mosaic GPU) for training: imports jax only, usable without surojax; see docs/kernels.md."""
