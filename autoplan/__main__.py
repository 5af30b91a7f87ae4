"""Start of the command line: `autoplan`, or `python -m autoplan`."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C while it is loaded ends it as quietly as later on."""
    try:
        from autoplan.cli import main as run_commands
    except KeyboardInterrupt:
        print("autoplan: interrupted", file=sys.stderr)
        sys.exit(130)
    run_commands()


if __name__ == "__main__":
    main()
