"""Collectives of a step: what is sent, how often, and what of it shows."""
