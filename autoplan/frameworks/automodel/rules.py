"""Rules on the plans of NeMo AutoModel: the rules of torchtitan, whose building blocks it uses, plus DeepEP."""

from __future__ import annotations

from dataclasses import replace

from autoplan.frameworks.torchtitan import rules as torchtitan
from autoplan.spec.axes import offered

EXTRAS = offered("automodel")  # its dispatcher: components/models/common/utils.py:301
RULES = torchtitan.rules_offering(*EXTRAS)
BOOK = replace(torchtitan.BOOK, rules=RULES, extras=EXTRAS)
