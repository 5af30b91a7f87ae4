"""Describe the training frameworks: what each admits, the files that start it, and the logs that it writes."""
