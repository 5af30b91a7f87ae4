"""Rules of frameworks whose own are not known: those that hold everywhere."""

from autoplan.frameworks.common.universal_rules import BOOK

__all__ = ["BOOK"]
