"""Memory of every pipeline rank, and what recomputation saves of it."""
