"""What moves between devices: collectives."""
