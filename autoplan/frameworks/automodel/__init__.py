"""NeMo AutoModel: its YAML, written and read."""
