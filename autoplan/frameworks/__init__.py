"""Training frameworks: the plans that each supports, its launch files and its logs."""
