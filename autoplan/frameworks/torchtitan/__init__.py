"""Torchtitan: its rules, launch files and logs."""
