"""Megatron bridge: its rules, launch files and logs."""
