"""How does a plan become files that start the run?  One module per framework, one for the launchers they share."""
