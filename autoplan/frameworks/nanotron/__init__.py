"""Nanotron: its rules, launch files and logs."""
