"""torchtitan: its rules, launch files and logs."""
