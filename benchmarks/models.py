"""Model types of transformers with a class for text, or images and text: which are read, and with what parameters.

usage: python benchmarks/models.py [--report FILE]

Every type's class is built with its default configuration on tensors without data, and its parameters are compared with
those of the model that its config.json is read as; so are the operations of a forward pass of text, which torch counts,
where transformers runs it without data, those of encoding an image, where its class takes one of a usual shape, and of
some types the bytes that a layer keeps, with adapters too.  What is refused is told with the refusal.  Needs torch,
transformers and PEFT.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from image_operations import image_excess
from layer_bytes import ADAPTERS, KINDS, PAIRS, excess
from reports import make_parser, write_report
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from autoplan.base.errors import InputError
from autoplan.cost.kernels.arithmetic import attention_context, count_parameters, model_flops_per_token
from autoplan.readers.huggingface import read_huggingface
from autoplan.spec.blocks import ATTENTION_BLOCKS, Block
from autoplan.spec.finetuning import FineTuning
from autoplan.spec.model import ModelSpec

CLOSE = 0.001  # relative: parameters that agree
CLOSE_OPERATIONS = 0.02
CLOSE_BYTES = 0.05
IMAGE_TEXT = "image-text"  # classes of which an image is counted; of the others text alone, or both texts of a pair
SEQ_LEN = 256  # a chunk of the scans of Mamba-2, and no more than any table of learned positions holds
# Whose forward pass of text in transformers does other work than training elsewhere, which is what ours counts.
OTHER_WORK = {
    "llama4": "all experts for every token",
    "llama4_text": "all experts for every token",
    "longt5": "blocks of 128 tokens beside neighbours, to which the tokens are padded",
    "pegasus_x": "blocks of 512 tokens, to which the tokens are padded",
    "cpmant": "32 tokens of a prompt beside those of the text",
    "falcon_h1": "products within chunks of 256 tokens of Mamba-2",
    "mamba2": "products within chunks of 256 tokens of Mamba-2",
}

CLASSES = {
    "causal": (transformers.AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "masked": (transformers.AutoModelForMaskedLM, MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    "sequence-to-sequence": (transformers.AutoModelForSeq2SeqLM, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    IMAGE_TEXT: (transformers.AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Outcome of one model type."""

    kind: str
    refusal: str = ""
    left_out: str = ""  # what is not priced, and unless by its weights not counted
    parameters: int = 0  # of transformers' model
    excess: float = 0.0  # of ours over them, as a share
    operations: float | None = None  # excess of ours over those that torch counts; None: not counted

    @property
    def is_in_part(self) -> bool:
        """Return whether weights of what is not priced are not counted."""
        return bool(self.left_out) and abs(self.excess) > CLOSE

    @property
    def differs(self) -> bool:
        """Return whether it was read as a whole, with other parameters."""
        return not self.refusal and not self.left_out and abs(self.excess) > CLOSE

    @property
    def works_otherwise(self) -> bool:
        """Return whether its operations differ from those that torch counts."""
        return self.operations is not None and abs(self.operations) > CLOSE_OPERATIONS


def rows(auto_class: Any, kinds: Iterable[str], *, has_images: bool) -> Iterator[Row]:
    """Yield what becomes of every model type whose class has a default configuration."""
    for kind in sorted(kinds):
        try:
            config = transformers.AutoConfig.for_model(kind)
            with torch.device("meta"):
                model = _eager(auto_class, config)
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
            if has_images:
                operations = image_excess(kind, lambda config: _eager(auto_class, config))
            else:
                counted = _counted_operations(model)
                operations = _operations(model_spec) / counted - 1 if counted else None
            row = Row(kind=kind, left_out=model_spec.left_out, parameters=expected, excess=excess)
            is_other = model_spec.left_out or (kind in OTHER_WORK and not has_images)
            yield row if is_other else replace(row, operations=operations)


def _eager(auto_class: Any, config: Any) -> Any:
    """Return a model that writes out attention and multiplies by the experts of each token, where it has such modes."""
    try:
        model = auto_class.from_config(config, attn_implementation="eager")
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("batched_mm")
    except (TypeError, ValueError):
        model = auto_class.from_config(config)
    return model.eval()  # which drops no layers


def _counted_operations(model: Any) -> int | None:
    """Operations that torch counts of a forward pass of one sequence; None where transformers needs data for it."""
    tokens = torch.zeros((1, SEQ_LEN), dtype=torch.long, device="meta")
    texts = {"input_ids": tokens} | ({"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {})
    with contextlib.suppress(Exception):  # of classes that insist on a number
        model.config.pad_token_id = None  # which would be looked for in the tokens
    for options in ({}, {"use_cache": False}):
        try:
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                model(**texts, **options)
        except Exception:  # whatever a class raises on tensors without data
            continue
        return int(counter.get_total_flops())
    return None


def _operations(model: ModelSpec) -> float:
    """Operations of a forward pass of a text, or of two, with both halves of causal squares, as eager attention."""
    text = replace(model, encoder=model.encoder if model.cross_attention else None, num_mtp_layers=0)
    masked = _masked(text) + (_masked(text.encoder.layers) if text.encoder else 0.0)
    return SEQ_LEN * (model_flops_per_token(text, SEQ_LEN) / 3 + masked)


def _masked(text: ModelSpec) -> float:
    """Operations a token of what masks leave out, which eager attention computes."""
    masked = 0.0
    for layer in text.layers:
        for block in layer:
            if block in ATTENTION_BLOCKS:
                own = text.attending(block)
                width = own.attention_streams * own.num_heads * (own.qk_head_dim + own.v_head_dim)
                width += sum(addition.score_width for addition in text.additions if addition.block == block)
                seen = SEQ_LEN * (2 if text.merged_attention else 1)
                masked += 2 * width * (seen - float(attention_context(text, Block(block), SEQ_LEN)))
    return masked


def main(arguments: list[str] | None = None) -> int:
    """Compare all types and print them; 1 where one is read with other parameters."""
    options = make_parser(__doc__).parse_args(arguments)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    lines, differs = [], False
    for name, (auto_class, kinds) in CLASSES.items():
        compared = list(rows(auto_class, kinds, has_images=name == IMAGE_TEXT))
        lines += _described(name, compared)
        differs |= any(row.differs or row.works_otherwise for row in compared)
    lines += [*_kept(), *_kept(ADAPTERS)]
    lines += ["operations not compared", *(f"other work  {kind}: {work}" for kind, work in OTHER_WORK.items())]
    print("\n".join(lines))
    if options.report:
        write_report(options.report, "Model types of transformers", "`python benchmarks/models.py`", "\n".join(lines))
    return int(differs)


def _kept(finetuning: FineTuning | None = None) -> list[str]:
    """Lines that say how far the bytes kept by a layer are off."""
    kept = {kind: excess(kind, finetuning) for kind in (*KINDS, *PAIRS)}
    num_close = sum(abs(share) <= CLOSE_BYTES for share in kept.values())
    beside = " with PEFT's adapters on all linear layers" if finetuning else ""
    return [
        f"bytes kept by a layer{beside} compared for {len(kept)}, of {num_close} within {CLOSE_BYTES:.0%}",
        "kept     " + " ".join(f"{kind} {share:+.1%}" for kind, share in kept.items()),
    ]


def _described(name: str, compared: list[Row]) -> list[str]:
    """Lines that say what became of the types with a class called `name`."""
    work = "encoding an image" if name == IMAGE_TEXT else "a forward pass"
    read = [row for row in compared if not row.refusal]
    in_part, wrong = [row for row in read if row.is_in_part], [row for row in read if row.differs]
    counted = [row for row in read if row.operations is not None]
    otherwise = [row for row in counted if row.works_otherwise]
    return [
        f"transformers {transformers.__version__}: {len(compared)} {name} model types with a default configuration, "
        f"{len(read) - len(in_part)} read as a whole, {len(read) - len(in_part) - len(wrong)} of them with as many "
        f"parameters, {len(in_part)} in part",
        *(
            [
                f"operations of {work} counted for {len(counted)}, of {len(counted) - len(otherwise)} within "
                f"{CLOSE_OPERATIONS:.0%}, of {sum(abs(row.operations or 0.0) < 0.0005 for row in counted)} within .05 %"
            ]
            if counted
            else []
        ),
        *(f"differs  {row.kind}: {row.excess:+.2%} of {row.parameters:,}" for row in wrong),
        *(f"differs  {row.kind}: {row.operations:+.2%} of its operations" for row in otherwise),
        "read     " + " ".join(row.kind for row in read if not row.is_in_part),
        *(f"in part  {row.kind} without {row.left_out}: {row.excess:+.2%} of {row.parameters:,}" for row in in_part),
        *(f"unpriced {row.kind}: {row.left_out}" for row in read if row.left_out and not row.is_in_part),
        *(f"refused  {row.refusal}" for row in compared if row.refusal),
    ]


if __name__ == "__main__":
    sys.exit(main())
