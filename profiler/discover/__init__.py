"""Discovery of the hardware of this machine or allocation, from tools and files to a `cluster.toml`."""
