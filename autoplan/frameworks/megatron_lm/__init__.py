"""Megatron-LM: its rules, launch files and logs."""
