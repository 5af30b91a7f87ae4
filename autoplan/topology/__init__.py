"""The cluster as a graph of devices, links and switches, and compiled to levels for the cost model."""
