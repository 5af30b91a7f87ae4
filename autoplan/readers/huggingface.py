"""Models from a Hugging Face config.json, whose keys are listed in presets/huggingface.toml."""

from __future__ import annotations

import contextlib
import math
import re
from typing import Any

from autoplan.base.errors import InputError
from autoplan.base.files import decode
from autoplan.base.names import close_names
from autoplan.cost.kernels.arithmetic import encoder_parameters
from autoplan.readers.config_keys import (
    ABSENT,
    Keys,
    check_spelling,
    field_entries,
    key_table,
    merged,
    rules_of,
    show,
    typed,
)
from autoplan.readers.config_layers import expert_layers, layer_pattern, windows
from autoplan.readers.vision import AROUND, Sizes, described
from autoplan.spec.model import ModelSpec

_SYMBOL_OF = {"moe": "E", "mamba": "M", "ffn_size": "-"}  # read only if the layer pattern has the symbol
_IMAGES = "vision_config"
_ENCODERS = (_IMAGES, "audio_config", "encoder_config")
_OF_LAYERS = ("window", "full_attention_interval", "has_head")  # fields of Around that are none of Encoder
_TEXT = "ForCausalLM"  # suffix of classes without an encoder
_PAIRS = ("ForConditionalGeneration", "ForTextToText", "MTModel", "WithLMHeadModel", "EncoderDecoderModel")


def model_types() -> tuple[str, ...]:
    """Return the model_types that can be read."""
    return tuple(sorted(key_table()["types"]))


def read_huggingface(table: dict[str, Any], name: str) -> ModelSpec:
    """Return the model described by the config.json `table`; `name` is its name, which begins every message."""
    try:
        config, kind = _text_model(table)
        fields = _spec_fields(Keys(config=_by_layers(config), kind=kind, rules=_rules(kind)))
        if fields.get("cross_attention") and _is_decoder_alone(table):
            fields = _without_encoder(fields) | _rules(kind).get("alone", {})
        is_pair = fields.get("cross_attention") and "source" in _rules(kind)
        encoder = _source_encoder(table, kind) if is_pair else _encoder(table, fields)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    read = [*_ENCODERS, "patch_size"] if encoder is not None or _is_text_alone(table) else []
    if outer := key_table()["outer"].get(table.get("model_type")):
        keys = Keys(config={**table, "text_hidden": fields["hidden_size"]}, kind=kind, rules=outer)
        with contextlib.suppress(InputError):  # other sizes: only the text model is read then
            _check_only(keys)
            ends = {"block": "ends", "num_parameters": keys.number(outer["parameters"])}
            fields["additions"], read = [*fields.get("additions", ()), ends], outer["reads"]
            fields["left_out"] = outer.get("left_out", "")
    unread = [key for key in key_table()["encoders"] if table.get(key) and key not in read]
    fields["left_out"] = " and ".join(unread) or fields.get("left_out", "")
    if encoder is not None:
        fields["encoder"] = encoder
    return decode(ModelSpec, {"name": name, **fields, "sources": [f"Hugging Face config.json, {kind}"]}, name)


def _is_decoder_alone(table: dict[str, Any]) -> bool:
    """Return whether the class in the file is the decoder of an encoder-decoder, like BartForCausalLM."""
    own = f"{re.sub('[-_]', '', str(table.get('model_type')))}{_TEXT}".casefold()
    return isinstance(names := table.get("architectures"), list) and [str(name).casefold() for name in names] == [own]


def _without_encoder(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a stand-alone decoder, whose layers keep the unused weights of cross attention."""
    if "layer_pattern" in fields:
        raise InputError("a decoder without the encoder that some of its layers attend to is not covered")
    hidden, biases = fields["hidden_size"], fields.get("qkv_bias", False)
    idle = 4 * (hidden + biases) * hidden + hidden * (2 if fields.get("norm") == "layernorm" else 1)
    additions = [*fields.get("additions", ()), {"block": "attention", "num_parameters": idle}]
    return {**fields, "cross_attention": False, "additions": additions}


def _by_layers(config: dict[str, Any]) -> dict[str, Any]:
    """Return the table with `per_layer_config` summarised by kind of layer, in full_layers and window_layers."""
    own, kinds = config.get("per_layer_config"), config.get("layer_types")
    if not isinstance(own, dict) or not isinstance(kinds, list):
        return config
    by_number = {int(at): entry for at, entry in own.items() if str(at).isdigit() and isinstance(entry, dict)}
    split = {}
    for name, is_full in (("full_layers", True), ("window_layers", False)):
        numbers = [at for at, kind in enumerate(kinds) if (kind != "sliding_attention") == is_full]
        entries = [by_number.get(at, {}) for at in numbers] or [{}]
        if any(entry != entries[0] for entry in entries):
            raise InputError("per_layer_config: only layers that differ by their entry in layer_types are supported")
        split[name] = {**config, **entries[0]}
    return {**config, **split}


def _is_text_alone(table: dict[str, Any]) -> bool:
    """Return whether the class in the file is a text-only model, like Qwen3_5ForCausalLM."""
    names = table.get("architectures")
    apart = [rules for rules in key_table()["encoder_types"].values() if not rules.get("within_text")]
    is_known = any(table.get("model_type") in rules["in"] for rules in apart)
    return is_known and isinstance(names, list) and bool(names) and all(str(name).endswith(_TEXT) for name in names)


def _encoder(table: dict[str, Any], text: dict[str, Any]) -> dict[str, Any] | None:
    """Return the `Encoder` fields for images or sound before a text model with the fields `text`; None if not read.

    If there is one of each, samples are priced with images only; the sound encoder counts with its weights.
    """
    given = {key: table[key] for key in _ENCODERS if table.get(key)}
    if not given or _is_text_alone(table):
        return None
    read = [_encoder_of(table, config, text, is_alone=len(given) == 1) for config in given.values()]
    if any(encoder is None for encoder in read):
        return None
    first, *others = [encoder for encoder in read if encoder]
    if _IMAGES not in given:
        first["sound"] = True
    first["num_other_parameters"] += sum(_num_parameters(other, text) for other in others)
    return first


def _num_parameters(encoder: dict[str, Any], text: dict[str, Any]) -> int:
    """Return the parameters of an encoder before a text model with the fields `text`."""
    return encoder_parameters(decode(ModelSpec, {"name": "other", **text, "encoder": encoder}, "other"))


def _encoder_of(table: dict[str, Any], config: Any, text: dict[str, Any], *, is_alone: bool) -> dict[str, Any] | None:
    """Return the `Encoder` fields of one table of the file; None if not read."""
    # Published files may omit the type, or use that of the surrounding model.
    outer, types = table.get("model_type"), key_table()["encoder_types"]
    known = {rules.get("type", kind): kind for kind, rules in types.items() if outer in rules["in"]}
    if not isinstance(config, dict):
        return None
    kind = config.get("model_type")
    if is_alone and len(known) == 1 and kind in (None, outer, f"{outer}_vision"):
        kind = next(iter(known))
    if not isinstance(kind, str) or kind not in known:
        return None
    kind = known[kind]
    config = {**config, "model_type": kind, "outer": table, "text_hidden": text["hidden_size"]}
    rules = {"vocab_size": "", **rules_of("encoder_types", kind)}
    try:
        keys = Keys(config=config, kind=kind, rules=rules)
        fields = _spec_fields(keys)
        sizes = Sizes(fields["num_layers"], fields["hidden_size"], fields["ffn_size"], text["hidden_size"])
        around = described(keys) if "around" in rules else AROUND[kind](table, config, sizes)
    except InputError:  # published files may leave sizes to class defaults: the encoder is ignored then
        return None
    beside = around._asdict()
    if beside.pop("has_head"):
        keys_and_values = {"block": "ends", "matrices": [(sizes.hidden, 2 * sizes.hidden)]}
        fields["additions"] = [*fields.get("additions", ()), keys_and_values]
    more = {"name": kind, "vocab_size": beside.pop("patch_numbers"), "bidirectional": True, "tied_embeddings": True}
    more |= {field: value for field in ("window", "full_attention_interval") if (value := beside.pop(field))}
    return {"layers": fields | more, **beside}


def _rules(kind: str) -> dict[str, Any]:
    return rules_of("types", kind)


def _source_encoder(table: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the `Encoder` fields of an encoder-decoder, by default those of the decoder.

    Samples are priced as text; an encoder of images before the encoder of text counts with its weights.
    """
    rules = _rules(kind)
    keys = Keys(config=_stack(table, "encoder"), kind=kind, rules=merged(rules, rules["source"]))
    fields = _spec_fields(keys)
    around = {"patches": 0, "image_tokens": 0, "embedding": "shared", **fields.pop("encoder", {})}
    if "around" in keys.rules:
        around |= {"embedding": "matrix", **described(keys)._asdict()}
        fields["vocab_size"] = around.pop("patch_numbers")
        around = {name: value for name, value in around.items() if name not in _OF_LAYERS}
    layers = {**fields, "name": kind, "bidirectional": True, "cross_attention": False}
    if any(kind in rules["in"] for rules in key_table()["encoder_types"].values()):
        if (images := _encoder({**keys.config, "model_type": kind}, layers)) is None:
            raise InputError(f"vision_config of a {kind} model is not covered: it must have all sizes of its encoder")
        around["num_other_parameters"] = around.get("num_other_parameters", 0) + _num_parameters(images, layers)
    return {"layers": layers, **around}


def _stack(table: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the table of an encoder or decoder: the file itself, or a table in it."""
    path = _rules(str(table.get("model_type"))).get("tables", {}).get(name, name)
    for step in path.split("."):
        table = {**table, **inner} if isinstance(inner := table.get(step), dict) else table
    return table


def _text_model(table: dict[str, Any], *, is_inner: bool = False) -> tuple[dict[str, Any], str]:
    """Return the table of the text model and its model_type; raises InputError unless it is a causal language model."""
    data, kind = key_table(), table.get("model_type")
    if {"schema_version", "mixed_schema_version"} & table.keys():
        raise InputError("a plan file, not a model: profile takes it as --for, estimate and explain as it is")
    if not isinstance(kind, str):
        raise InputError("model_type " + ("is missing" if kind is None else f"must be text, got {show(kind)}"))
    is_known = kind in data["types"]
    is_pair = table.get("is_encoder_decoder") not in (None, False)
    if is_known and "source" in _rules(kind):
        if _is_decoder_alone(table):
            return _stack(table, "decoder"), kind
        if not is_pair:
            raise InputError(f"a decoder of {kind} without its encoder is not covered: say is_encoder_decoder = true")
        _check_class(table, _PAIRS, "encoder-decoder")
        return _stack(table, "decoder"), kind
    if is_pair:
        part = data["uncovered"].get(kind, "cross attention")
        raise InputError(
            f"is_encoder_decoder = {show(table['is_encoder_decoder'])}: a {kind} has {part}, which is not covered; "
            "only a decoder or an encoder alone is"
        )
    inner = next((key for key in data["text_models"] if key in table), None)
    if inner and not is_inner:
        text = table[inner]
        if not isinstance(text, dict):
            raise InputError(f"{inner} of a {kind} model must be a table, got {show(text)}")
        shared = {"tie_word_embeddings": table["tie_word_embeddings"]} if "tie_word_embeddings" in table else {}
        return _text_model({**text, **shared}, is_inner=True)
    if kind in data["uncovered"]:
        raise InputError(f"model_type {show(kind)} has {data['uncovered'][kind]}, which is not covered")
    if not is_known:
        close = close_names(kind, model_types())
        hint = f"did you mean {', '.join(close)}? " * bool(close)
        hint += f"{len(model_types())} are; for another one, autoplan new model writes a template"
        if "auto_map" in table:
            raise InputError(f"model_type {show(kind)} needs its own code (auto_map), which is not run; {hint}")
        raise InputError(f"model_type {show(kind)} is not known; {hint}")
    if is_inner or any(key in table for key in data["encoders"]):
        return table, kind
    is_masked = _rules(kind).get("bidirectional") not in (None, "")
    heads = (_TEXT, "LMHeadModel", "GenerationDecoder", *(["ForMaskedLM"] if is_masked else []))
    _check_class(table, heads, "language model with a masked or causal loss" if is_masked else "causal language model")
    return table, kind


def _check_class(table: dict[str, Any], heads: tuple[str, ...], kinds: str) -> None:
    """Raise an error for a file whose class has another head."""
    names = table.get("architectures")
    if names is not None and not isinstance(names, list):
        raise InputError(f"architectures must be a list of names, got {show(names)}")
    if names is not None and not any(str(architecture).endswith(heads) for architecture in names):
        shown = heads[-1] if "ForMaskedLM" in heads else " or ...".join(heads[:2])
        raise InputError(f"architectures = {show(names)} names no {kinds} (...{shown})")


def _spec_fields(keys: Keys) -> dict[str, Any]:
    """Return the fields of ModelSpec, with nested tables."""
    check_spelling(keys)
    _check_only(keys)
    entries = key_table()["common"] | dict(field_entries(keys.rules))
    result: dict[str, Any] = {}
    switches = keys.rules.get("switch", {})
    pattern = layer_pattern(keys) if "layer_pattern" in entries or "hybrid" in keys.rules else None
    if pattern is not None:
        entries |= {"layer_pattern": pattern, "num_layers": len(pattern)}
    for field, entry in entries.items():
        part, _, inner = field.rpartition(".")
        is_unused = pattern is not None and _SYMBOL_OF.get(part or field, "") not in pattern
        is_unused |= part in switches and keys.assumed(switches[part]) is not True
        value = (
            pattern
            if field == "layer_pattern"
            else ABSENT
            if entry == "" or is_unused
            else keys.value(part, inner, entry)
        )
        if value is not ABSENT:
            _set(result, field, value)
    if "moe" in result and pattern is None:
        result["moe"] |= expert_layers(keys, result["num_layers"])
    if rounded := keys.rules.get("rounded"):
        multiple, factor = keys.count(rounded["multiple"]) or 1, typed("", keys.assumed(rounded["factor"]), float)
        result["ffn_size"] = math.ceil(result["hidden_size"] * factor / multiple) * multiple
    if "narrowed" in keys.rules and keys.assumed("block_auto_adjust_ff_dim") is True:
        # Two thirds of the size in the file, rounded up to whole blocks (modeling_lfm2.py, Lfm2MLP).
        block = keys.count(keys.rules["narrowed"]["blocks_of"]) or 1
        result["ffn_size"] = -(-int(2 * result["ffn_size"] / 3) // block) * block
    if additions := _additions(keys):
        result["additions"] = additions
    return result | windows(keys, result)


def _check_only(keys: Keys) -> None:
    """Raise an error for anything that ModelSpec cannot express."""
    for key, allowed in keys.rules.get("only", {}).items():
        value = keys.assumed(key)
        same_as = keys.get(allowed) if isinstance(allowed, str) else allowed
        if isinstance(value, list) and value and all(entry in (allowed, same_as) for entry in value):
            continue  # the same in every layer
        if value is not ABSENT and value is not None and value not in (allowed, same_as):
            raise InputError(f"{key} = {show(value)} is not covered for {keys.kind}, only {show(allowed)}")
    for key, parts in keys.rules.get("alike", {}).items():
        value = keys.assumed(key)
        if isinstance(value, list) and any(entry != value[0] for entry in value):
            raise InputError(f"{key} = {show(value)}: only {parts} that are alike are covered for {keys.kind}")


def _additions(keys: Keys) -> list[dict[str, Any]]:
    """Return additional parts of blocks; a matrix without rows or columns is left out."""
    result = []
    for name, parts in keys.rules.get("additions", {}).items():
        if "when" in parts and keys.assumed(parts["when"]) is not True:
            continue
        sizes = [keys.sizes(text) for text in parts.get("matrices", ())]
        products = [keys.sizes(text) for text in parts.get("products", ())]
        weightless = sum(inputs * outputs for inputs, outputs in products)
        result += [
            {
                "block": block,
                "matrices": [pair for pair in (*sizes, *products) if all(pair)],
                "num_parameters": keys.number(parts.get("parameters", "0")) - weightless,
                "score_width": keys.number(parts.get("scores", "0")),
            }
            for block in parts.get("blocks", name).split()
        ]
    return result


def _set(result: dict[str, Any], field: str, value: Any) -> None:
    """Set a field, possibly nested, by its dotted name."""
    *parts, inner = field.split(".")
    for part in parts:
        result = result.setdefault(part, {})
    result[inner] = value
