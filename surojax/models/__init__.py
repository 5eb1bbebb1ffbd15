"""What is computed: models as Flax modules, and the pure functions that the engine calls."""
