"""Rules of frameworks whose own are not known: those that hold everywhere, and at most the optimizer on the host."""

from dataclasses import replace

from autoplan.frameworks.common import universal_rules as universal
from autoplan.frameworks.common.rules import SupportedWords

OFFLOADS = SupportedWords(axis="offload", words=("none", "optimizer"), source=universal.SOURCE)
BOOK = replace(universal.BOOK, rules=(*universal.BOOK.rules, OFFLOADS.rule()), supported=(OFFLOADS,))
