"""FSDP2: its rules, launch files and logs."""
