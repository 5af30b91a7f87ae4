"""Discovery of the parts of this machine or allocation: its tools and files are read into a `cluster.toml`."""
