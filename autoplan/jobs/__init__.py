"""Start trials here or as jobs of a scheduler, and follow them."""
