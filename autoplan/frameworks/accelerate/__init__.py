"""Accelerate: its rules, launch files and logs."""
