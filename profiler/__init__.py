"""Measured times of kernels and collectives on this machine."""

if __name__ != "autoplan.profiler":  # the folder on the path of a program of that name
    raise ImportError("import autoplan.profiler, not profiler")
