"""LLaMA-Factory: its YAML, written and read; the Trainer's arguments are those of `hf_trainer`."""
