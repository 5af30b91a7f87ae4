"""Collectives of a step: what is sent, how often, and what part is exposed."""
