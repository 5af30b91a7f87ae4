"""Deepspeed: its rules, launch files and logs."""
