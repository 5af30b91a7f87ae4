"""Files that start a run of a plan under every launcher: a module for each kind, and those that they share."""
