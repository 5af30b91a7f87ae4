"""DeepSpeed: its rules, launch files and logs."""
