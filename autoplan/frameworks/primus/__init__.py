"""Primus: its rules, launch files and logs."""
