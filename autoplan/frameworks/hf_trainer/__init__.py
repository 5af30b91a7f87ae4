"""Trainer of Hugging Face's transformers: its arguments, written and read, for all programs that take them."""
