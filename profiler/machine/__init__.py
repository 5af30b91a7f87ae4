"""Hardware and software of this machine, and the load on it while something is measured."""
