"""NeMo AutoModel: its YAML, read."""
