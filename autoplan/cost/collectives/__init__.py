"""Collectives of a step: what is sent, how often, and the exposed part."""
