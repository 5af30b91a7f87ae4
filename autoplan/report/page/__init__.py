"""Self-contained HTML page of a search: a module for every section, beside its style and scripts."""
