"""Models as Flax NNX modules with logical axis names, and the pure functions of them that the engine calls."""
