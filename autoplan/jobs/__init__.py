"""Trials, started on this machine or as jobs of a scheduler, and followed."""
