"""A framework that shards data-parallel ranks alone, as a probe of what a framework touches."""
