"""Self-contained HTML page of a search: one module per section, with style and scripts."""
