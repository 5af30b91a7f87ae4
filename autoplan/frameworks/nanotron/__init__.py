"""nanotron: its rules, launch files and logs."""
