"""Measured times of kernels and collectives on this machine."""

if __name__ != "autoplan.profiler":  # imported as top-level `profiler`, because the project's root is on sys.path
    raise ImportError("import autoplan.profiler, not profiler")
