"""Trainer: its rules, launch files and logs."""
