"""Pipelines: the blocks of every rank, the order of its passes, and their total time."""
