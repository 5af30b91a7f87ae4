"""Rules of the probe: data parallelism alone."""

from __future__ import annotations

from autoplan.frameworks.common import universal_rules
from autoplan.frameworks.common.rules import Rule, Rulebook

RULES: tuple[Rule, ...] = (
    *universal_rules.BOOK.rules,
    Rule(
        source="probe",
        holds=lambda workload, batch: batch.tp * batch.cp * batch.pp * batch.ep == 1,
        says=lambda workload, plan: "the probe has data parallelism alone",
    ),
)
BOOK = Rulebook(rules=RULES, usual_shardings=("zero3",))
