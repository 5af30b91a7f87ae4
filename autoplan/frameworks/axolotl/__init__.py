"""Axolotl: its YAML, written and read; what the Trainer takes goes through the table of `hf_trainer`."""
