"""Data movement between memories: pinned host memory, files on NVMe disks, prefetch."""
