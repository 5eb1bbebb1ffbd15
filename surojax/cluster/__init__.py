"""Many processes: who they are, how they meet, and how they end together."""
