"""Measured times of kernels and collectives on this machine."""

if __name__ != "autoplan.profiler":  # this folder is imported as a top-level package by another program
    raise ImportError("import autoplan.profiler, not profiler")
