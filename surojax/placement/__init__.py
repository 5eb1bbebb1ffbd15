"""Where every tensor is stored: the device mesh, the table of tensor classes, layouts of parameters."""
