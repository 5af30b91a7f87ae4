"""Cost model: step time and device memory of a plan."""
