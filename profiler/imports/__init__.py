"""What have others measured already?  One reader per collection of timings."""
