"""Pipelines: which blocks every rank holds, the order of its passes, and how long all of them take."""
