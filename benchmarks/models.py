"""Model types of transformers with a class for text, or images and text: which are read, and with what parameters.

usage: python benchmarks/models.py [--report FILE]

Every type's class is built with its default configuration on tensors without data, and its parameters are compared with
those of the model that its config.json is read as.  What is refused is told with the refusal.  Needs torch and
transformers.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from reports import make_parser, write_report
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from autoplan.base.errors import InputError
from autoplan.cost.kernels.arithmetic import count_parameters
from autoplan.readers.huggingface import read_huggingface

CLOSE = 0.001  # relative: parameters that agree

CLASSES = {
    "causal": (transformers.AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "masked": (transformers.AutoModelForMaskedLM, MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    "sequence-to-sequence": (transformers.AutoModelForSeq2SeqLM, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    "image-text": (transformers.AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Outcome of one model type."""

    kind: str
    refusal: str = ""
    left_out: str = ""  # what is not planned for, and so not counted
    parameters: int = 0  # of transformers' model
    excess: float = 0.0  # of ours over them, as a share

    @property
    def differs(self) -> bool:
        """Return whether it was read as a whole, with other parameters."""
        return not self.refusal and not self.left_out and abs(self.excess) > CLOSE


def rows(auto_class: Any, kinds: Iterable[str]) -> Iterator[Row]:
    """Yield what becomes of every model type whose class has a default configuration."""
    for kind in sorted(kinds):
        try:
            config = transformers.AutoConfig.for_model(kind)
            with torch.device("meta"):
                model = auto_class.from_config(config)
        except Exception as error:  # whatever a class raises that has no usable default
            print(f"{kind}: transformers builds none by default ({type(error).__name__})", file=sys.stderr)
            continue
        table: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
        table["architectures"] = [type(model).__name__]
        expected = sum(parameter.numel() for parameter in model.parameters())
        try:
            model_spec = read_huggingface(table, kind)
        except InputError as error:
            yield Row(kind=kind, refusal=str(error).partition("; known")[0], parameters=expected)
        else:
            excess = count_parameters(model_spec) / expected - 1
            yield Row(kind=kind, left_out=model_spec.left_out, parameters=expected, excess=excess)


def main(arguments: list[str] | None = None) -> int:
    """Compare all types and print them; 1 where one is read with other parameters."""
    options = make_parser(__doc__).parse_args(arguments)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    lines, differs = [], False
    for name, (auto_class, kinds) in CLASSES.items():
        compared = list(rows(auto_class, kinds))
        lines += _described(name, compared)
        differs |= any(row.differs for row in compared)
    print("\n".join(lines))
    if options.report:
        write_report(options.report, "Model types of transformers", "`python benchmarks/models.py`", "\n".join(lines))
    return int(differs)


def _described(name: str, compared: list[Row]) -> list[str]:
    """Lines that say what became of the types with a class called `name`."""
    read = [row for row in compared if not row.refusal]
    in_part, wrong = [row for row in read if row.left_out], [row for row in read if row.differs]
    return [
        f"transformers {transformers.__version__}: {len(compared)} {name} model types with a default configuration, "
        f"{len(read) - len(in_part)} read as a whole, {len(read) - len(in_part) - len(wrong)} of them with as many "
        f"parameters, {len(in_part)} in part",
        *(f"differs  {row.kind}: {row.excess:+.2%} of {row.parameters:,}" for row in wrong),
        "read     " + " ".join(row.kind for row in read if not row.left_out),
        *(f"in part  {row.kind} without {row.left_out}: {row.excess:+.2%} of {row.parameters:,}" for row in in_part),
        *(f"refused  {row.refusal}" for row in compared if row.refusal),
    ]


if __name__ == "__main__":
    sys.exit(main())
