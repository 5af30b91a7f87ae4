"""Price plans whose replicas and stages are on different devices."""
