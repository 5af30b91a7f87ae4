"""Pricing of plans whose replicas and stages are on different devices."""
