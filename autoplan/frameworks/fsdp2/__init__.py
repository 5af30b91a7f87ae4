"""Fsdp2: its rules, launch files and logs."""
