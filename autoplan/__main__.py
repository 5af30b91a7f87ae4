"""Run the command line as `python -m autoplan`."""

from autoplan.cli import main

main()
