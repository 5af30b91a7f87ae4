"""Launch files for a plan under every launcher: one module per kind, and shared parts."""
