"""Readers of models, clusters and calibrations."""
