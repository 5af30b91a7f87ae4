"""Rules of frameworks without known rules: the universal ones, and offloading of at most the optimizer."""

from dataclasses import replace

from autoplan.frameworks.common import universal_rules as universal
from autoplan.frameworks.common.rules import SupportedWords

OFFLOADS = SupportedWords(axis="offload", words=("none", "optimizer"))
BOOK = replace(universal.BOOK, rules=(*universal.BOOK.rules, OFFLOADS.rule()), supported=(OFFLOADS,))
