"""Read tables and logs of measured runs."""
