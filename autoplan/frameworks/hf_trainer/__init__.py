"""Trainer of Hugging Face's transformers: its arguments, read, for all programs that take them."""
