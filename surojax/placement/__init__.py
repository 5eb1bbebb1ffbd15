"""Where every tensor lives: the device mesh, the table of tensor classes, layouts of parameters."""
