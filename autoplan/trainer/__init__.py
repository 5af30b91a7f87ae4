"""The built-in trainer: plain torch code that runs a plan, measures it, and verifies its numerics."""
