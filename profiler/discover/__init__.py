"""What is this machine, or this allocation, made of?  Read from its tools and files into a `cluster.toml`."""
