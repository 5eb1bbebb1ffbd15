"""The models: Flax modules, and the pure functions of arrays that the engine calls."""
