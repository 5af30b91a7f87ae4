"""Axolotl: its YAML, read; what the Trainer takes goes through the table of `hf_trainer`."""
