"""LLaMA-Factory: its YAML, read; the Trainer's arguments are those of `hf_trainer`."""
