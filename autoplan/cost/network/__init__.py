"""Time of collectives and messages on the links of a cluster, and their process groups."""
