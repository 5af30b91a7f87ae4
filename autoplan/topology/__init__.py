"""Topology: the cluster as a graph of devices, links and switches, compiled to levels for the cost model."""
