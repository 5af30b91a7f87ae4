"""Megatron-Bridge: its rules, launch files and logs."""
