"""Memory of every pipeline rank, and the memory saved by recomputation."""
