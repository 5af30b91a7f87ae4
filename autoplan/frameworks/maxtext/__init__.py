"""MaxText: its rules, and its YAML, written and read."""
