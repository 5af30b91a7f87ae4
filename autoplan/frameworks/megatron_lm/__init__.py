"""Megatron lm: its rules, launch files and logs."""
