"""What moves between memories: pinned host memory, files on NVMe, prefetch."""
