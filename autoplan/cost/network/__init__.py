"""Time of collectives and messages on the links of a cluster, and the ranks that take part."""
