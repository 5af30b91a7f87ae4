"""Price plans whose replicas and stages sit on unlike devices."""
