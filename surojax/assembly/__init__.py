"""All rooms below put together: the parts of a run, before any array exists."""
