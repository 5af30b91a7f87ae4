"""Models from a Hugging Face config.json, whose keys are listed in presets/huggingface.toml."""

from __future__ import annotations

import functools
import math
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any

from autoplan.base.errors import InputError
from autoplan.base.files import decode, read_table, shipped
from autoplan.base.names import close_names
from autoplan.readers.vision import AROUND, Sizes
from autoplan.spec.model import Encoder, Experts, LatentAttention, LinearAttention, Mamba, ModelSpec

MOST = 10**9  # of any count in a config.json
_PARTS: dict[str, type] = {
    "": ModelSpec,
    "mla": LatentAttention,
    "moe": Experts,
    "mamba": Mamba,
    "linear_attention": LinearAttention,
    "encoder": Encoder,
}
_SYMBOL_OF = {"moe": "E", "mamba": "M", "ffn_size": "-"}  # read only where the layer pattern has the symbol
_ABSENT: Any = object()
_TEXT = "ForCausalLM"  # ends the names of classes that have no encoder
_FULL = "full_attention"  # in layer_types


@functools.cache
def _data() -> dict[str, Any]:
    return read_table(shipped()["huggingface"])


def model_types() -> tuple[str, ...]:
    """The model_types that can be read."""
    data = _data()
    return tuple(sorted({*data["types"], *data["same_keys"]}))


def read_huggingface(table: dict[str, Any], name: str) -> ModelSpec:
    """The model that the config.json `table` describes; `name` is its name, and stands before every message."""
    try:
        config, kind = _text_model(table)
        fields = _Config(config=config, kind=kind, rules=_rules(kind)).spec_fields()
        encoder = _source_encoder(table, kind) if fields.get("cross_attention") else _encoder(table, fields)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    read = ["vision_config", "audio_config"] if encoder is not None or _is_text_alone(table) else []
    unread = [key for key in _data()["encoders"] if table.get(key) and key not in read]
    fields["left_out"] = " and ".join(unread + [key for key in _data()["indexers"] if config.get(key)])
    if encoder is not None:
        fields["encoder"] = encoder
    return decode(ModelSpec, {"name": name, **fields, "sources": [f"Hugging Face config.json, {kind}"]}, name)


def _is_text_alone(table: dict[str, Any]) -> bool:
    """Return whether the class that the file names has the text model alone, as Qwen3_5ForCausalLM does."""
    names = table.get("architectures")
    is_known = any(table.get("model_type") in rules["in"] for rules in _data()["encoder_types"].values())
    return is_known and isinstance(names, list) and bool(names) and all(str(name).endswith(_TEXT) for name in names)


def _encoder(table: dict[str, Any], text: dict[str, Any]) -> dict[str, Any] | None:
    """Return the fields of `Encoder` of images or sound before a text model with the fields `text`; None: not read."""
    given, outer = [table[key] for key in ("vision_config", "audio_config") if table.get(key)], table.get("model_type")
    if len(given) != 1 or not isinstance(given[0], dict) or _is_text_alone(table):
        return None
    # Published files may leave out the type, or call it as the model around it.
    config, types = given[0], _data()["encoder_types"]
    known = {kind: rules for kind, rules in types.items() if outer in rules["in"]}
    kind = config.get("model_type")
    if len(known) == 1 and kind in (None, outer, f"{outer}_vision"):
        kind = next(iter(known))
    if not isinstance(kind, str) or kind not in known:
        return None
    config = {**config, "model_type": kind}
    own = {part: entries for part, entries in known[kind].items() if isinstance(entries, dict)}
    rules = _with(types.get(known[kind].get("like"), {}), own)
    rules["keys"] = {"vocab_size": "", **rules.get("keys", {})}
    try:
        fields = _Config(config=config, kind=kind, rules=rules).spec_fields()
        sizes = Sizes(fields["num_layers"], fields["hidden_size"], fields["ffn_size"], text["hidden_size"])
        around = AROUND[kind](table, config, sizes)
    except InputError:  # published files leave sizes to the defaults of a class: the encoder is left out then
        return None
    beside = around._asdict()
    more = {"name": kind, "vocab_size": beside.pop("patch_numbers"), "bidirectional": True, "tied_embeddings": True}
    more |= {field: beside.pop(field) for field in ("window", "full_attention_interval")}
    return {"layers": fields | more, **beside}


def _rules(kind: str) -> dict[str, Any]:
    """Meaning of the keys of a model_type; one with the keys of another may have some of its own."""
    types = _data()["types"]
    own: dict[str, Any] = types.get(kind, {})
    same = _data()["same_keys"].get(kind)
    return own if same is None else _with(types[same], own)


def _with(rules: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Rules with those that a type or an encoder has of its own."""
    return {**rules, **{part: {**rules.get(part, {}), **entries} for part, entries in own.items()}}


def _source_encoder(table: dict[str, Any], kind: str) -> dict[str, Any]:
    """The fields of `Encoder` of an encoder-decoder: those of the decoder where it has no others."""
    rules = _rules(kind)
    fields = _Config(config=_stack(table, "encoder"), kind=kind, rules=_with(rules, rules["encoder"])).spec_fields()
    around = {"patches": 0, "image_tokens": 0, "embedding": "shared", **fields.pop("encoder", {})}
    return {"layers": {**fields, "name": kind, "bidirectional": True, "cross_attention": False}, **around}


def _stack(table: dict[str, Any], name: str) -> dict[str, Any]:
    """The table of an encoder or decoder: the file's own, or one in it."""
    inner = table.get(name)
    return {**table, **inner} if isinstance(inner, dict) else table


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _text_model(table: dict[str, Any], *, is_inner: bool = False) -> tuple[dict[str, Any], str]:
    """The table of the text model and its model_type; whatever is not a causal language model is refused."""
    data, kind = _data(), table.get("model_type")
    if not isinstance(kind, str):
        raise InputError("model_type " + ("is missing" if kind is None else f"must be text, got {_show(kind)}"))
    is_known = kind in data["types"] or kind in data["same_keys"]
    is_pair = table.get("is_encoder_decoder") not in (None, False)
    if is_known and "encoder" in _rules(kind):
        if not is_pair:
            raise InputError(f"a decoder of {kind} without its encoder is not covered: say is_encoder_decoder = true")
        _check_class(table, ("ForConditionalGeneration", "MTModel", "WithLMHeadModel"), "encoder-decoder")
        return _stack(table, "decoder"), kind
    if is_pair:
        part = data["uncovered"].get(kind, "cross attention")
        raise InputError(
            f"is_encoder_decoder = {_show(table['is_encoder_decoder'])}: a {kind} has {part}, which is not covered; "
            "only a decoder or an encoder alone is"
        )
    inner = next((key for key in data["text_models"] if key in table), None)
    if inner and not is_inner:
        text = table[inner]
        if not isinstance(text, dict):
            raise InputError(f"{inner} of a {kind} model must be a table, got {_show(text)}")
        shared = {"tie_word_embeddings": table["tie_word_embeddings"]} if "tie_word_embeddings" in table else {}
        return _text_model({**text, **shared}, is_inner=True)
    if kind in data["uncovered"]:
        raise InputError(f"model_type {_show(kind)} has {data['uncovered'][kind]}, which is not covered")
    if not is_known:
        close = close_names(kind, model_types())
        hint = f"did you mean {', '.join(close)}? " * bool(close)
        hint += f"{len(model_types())} are; autoplan new model begins a file of sizes for another one"
        if "auto_map" in table:
            raise InputError(f"model_type {_show(kind)} needs code of its own (auto_map), which is not run; {hint}")
        raise InputError(f"model_type {_show(kind)} is not known; {hint}")
    if is_inner or any(key in table for key in data["encoders"]):
        return table, kind
    is_masked = any("bidirectional" in _rules(kind).get(part, {}) for part in ("keys", "set"))
    heads = (_TEXT, "LMHeadModel", "GenerationDecoder", *(["ForMaskedLM"] if is_masked else []))
    _check_class(table, heads, "language model with a masked or causal loss" if is_masked else "causal language model")
    return table, kind


def _check_class(table: dict[str, Any], heads: tuple[str, ...], kinds: str) -> None:
    """Refuse a file whose class has another head."""
    names = table.get("architectures")
    if names is not None and not isinstance(names, list):
        raise InputError(f"architectures must be a list of names, got {_show(names)}")
    if names is not None and not any(str(architecture).endswith(heads) for architecture in names):
        shown = heads[-1] if "ForMaskedLM" in heads else heads[0]
        raise InputError(f"architectures = {_show(names)} names no {kinds} (...{shown})")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Config:
    """Content of a config.json and what its model_type makes of the keys."""

    config: dict[str, Any]
    kind: str
    rules: dict[str, Any]

    def spec_fields(self) -> dict[str, Any]:
        """The fields of ModelSpec, with nested tables."""
        self.check_only()
        keys: dict[str, str] = {**_data()["common"], **self.rules.get("keys", {})}
        result: dict[str, Any] = {}
        pattern = self.pattern() if "layer_pattern" in keys or "hybrid" in self.rules else None
        if pattern is not None:
            keys |= {"layer_pattern": "", "num_layers": ""}
            result |= {"layer_pattern": pattern, "num_layers": len(pattern)}
        for field, expression in keys.items():
            part, _, inner = field.rpartition(".")
            is_unused = pattern is not None and _SYMBOL_OF.get(part or field, "") not in pattern
            if not expression or is_unused:
                continue
            value = self.value(part, inner, expression)
            if value is not _ABSENT:
                (result.setdefault(part, {}) if part else result)[inner] = value
        for field, value in self.rules.get("set", {}).items():
            part, _, inner = field.rpartition(".")
            (result.setdefault(part, {}) if part else result)[inner] = value
        if "moe" in result and pattern is None:
            result["moe"] |= self.expert_layers(result["num_layers"])
        if "narrowed" in self.rules and self.assumed("block_auto_adjust_ff_dim") is True:
            # Two thirds of what the file says, in whole blocks (modeling_lfm2.py, Lfm2MLP).
            block = self.count(self.rules["narrowed"]["blocks_of"]) or 1
            result["ffn_size"] = -(-int(2 * result["ffn_size"] / 3) // block) * block
        return result | self.window(result)

    def check_only(self) -> None:
        """Refuse what ModelSpec cannot express."""
        for key, allowed in self.rules.get("only", {}).items():
            value = self.assumed(key)
            same_as = self.config.get(allowed) if isinstance(allowed, str) else allowed
            if value is not _ABSENT and value is not None and value not in (allowed, same_as):
                raise InputError(f"{key} = {_show(value)} is not covered for {self.kind}, only {_show(allowed)}")

    def get(self, key: str) -> Any:
        """Value in the file under a key whose dots enter tables."""
        value: Any = self.config
        for step in key.split("."):
            if value is _ABSENT or value is None:
                return _ABSENT
            if not isinstance(value, dict):
                raise InputError(f"{key.rpartition('.')[0]} must be a table, got {_show(value)}")
            value = value.get(step, _ABSENT)
        return value

    def assumed(self, key: str) -> Any:
        """Value in the file, or else the default of the transformers class."""
        value = self.get(key)
        return self.rules.get("absent", {}).get(key, _ABSENT) if value is _ABSENT else value

    def count(self, key: str) -> int:
        """The whole number under a key that the windows need."""
        value = _typed(key, self.assumed(key), int)
        if value is _ABSENT:
            raise InputError(f"{key} is null: {self.kind} models with a window need it")
        return int(value)

    def value(self, part: str, inner: str, expression: str) -> Any:
        """The value of one field, `_ABSENT` where its default holds; the file comes before the class's assumptions."""
        field = next(inner_field for inner_field in fields(_PARTS[part]) if inner_field.name == inner)
        hint = typing.get_type_hints(_PARTS[part])[inner]
        choices = self.rules.get("choices", {}).get(inner)
        if isinstance(choices, dict):
            return self.chosen(expression, choices)
        kind = bool if choices else typing.get_args(hint)[0] if isinstance(hint, types.UnionType) else hint
        alternatives = [text.split() for text in expression.split("|")]
        for look_up in (self.get, self.assumed):
            for terms in alternatives:
                if (value := _computed(terms, kind, look_up)) is not _ABSENT:
                    return choices[value] if choices else value
        if field.default is MISSING or inner == "ffn_size":
            key = next(term for term in alternatives[0] if not term.isdigit())
            raise InputError(f"{key} is {'null' if self.get(key) is None else 'missing'}: {self.kind} models need it")
        return _ABSENT

    def chosen(self, key: str, choices: dict[str, Any]) -> Any:
        """What a word under a key stands for."""
        word = _typed(key, self.assumed(key), str)
        if word not in choices:
            raise InputError(f"{key} = {_show(word)} is not covered for {self.kind}, only {', '.join(choices)}")
        return choices[word]

    def pattern(self) -> str:
        """The layer pattern of a hybrid, from its text or from its list of block types."""
        if "hybrid" in self.rules:
            return self.paired_pattern(self.rules["hybrid"])
        listed = self.get("layers_block_type")
        if listed is _ABSENT or listed is None:
            text = self.value("", "layer_pattern", self.rules["keys"]["layer_pattern"])
            if text is _ABSENT or not text:
                raise InputError("hybrid_override_pattern or layers_block_type is missing or empty")
            return str(text)
        symbols: dict[str, str] = _data()["symbols"]
        return "".join(symbols[kind] for kind in self.kinds("layers_block_type", tuple(symbols)))

    def paired_pattern(self, rule: dict[str, str]) -> str:
        """The layer pattern of layers that have Mamba or attention, and behind it a feed-forward block or none."""
        num_layers = self.value("", "num_layers", "num_hidden_layers")
        symbols: dict[str, str] = _data()["symbols"]
        if "layers" in rule and self.get(rule["layers"]) not in (_ABSENT, None):
            first = [symbols[kind] for kind in self.kinds(rule["layers"], tuple(symbols))]
            if len(first) != num_layers:
                raise InputError(f"{rule['layers']} has {len(first)} entries, the model has {num_layers} layers")
        else:
            listed = self.get(rule["attention"]) if "attention" in rule else _ABSENT
            numbers = [] if listed is _ABSENT or listed is None else listed
            if not isinstance(numbers, list) or not all(type(item) is int for item in numbers):
                raise InputError(f"{rule['attention']} must be a list of layer numbers, got {_show(numbers)}")
            first = ["*" if at in numbers else rule.get("other", "M") for at in range(num_layers)]
        if "attention_every" in rule:
            attends, routes = (self.every(rule[key], num_layers) for key in ("attention_every", "experts_every"))
            return "".join("M*"[attends[at]] + "-E"[routes[at]] for at in range(num_layers))
        has_experts = "experts" in rule and _typed(rule["experts"], self.assumed(rule["experts"]), int)
        second = "E" if has_experts and has_experts is not _ABSENT else rule.get("second", "")
        return "".join(symbol + second for symbol in first)

    def every(self, keys: str, num_layers: int) -> list[bool]:
        """Which layers have what comes once in a period, at an offset, under two keys."""
        period, offset = (self.count(key) for key in keys.split())
        return [bool(period) and at % period == offset for at in range(num_layers)]

    def kinds(self, key: str, allowed: tuple[str, ...]) -> list[str]:
        """A list with one word a layer."""
        value = self.get(key)
        if not isinstance(value, list) or not value:
            raise InputError(f"{key} must be a list with one word a layer, got {_show(value)}")
        for item in value:
            if not isinstance(item, str) or item not in allowed:
                raise InputError(f"{key} holds {_show(item)}; known: {', '.join(allowed)}")
        return value

    def window(self, sizes: dict[str, Any]) -> dict[str, Any]:
        """Return which layers attend to a window, or linearly, and the size of it.

        In a regular order, or in a `layer_pattern` of two symbols a layer of `sizes`.
        """
        num_layers = sizes["num_layers"]
        rule = self.rules.get("window")
        if not rule or ("switch" in rule and _typed(rule["switch"], self.assumed(rule["switch"]), bool) is not True):
            return {}
        size = _typed(rule["size"], self.assumed(rule["size"]), int) if "size" in rule else 0
        if size is _ABSENT or not num_layers:
            return {}
        if self.get("layer_types") not in (_ABSENT, None):
            limited_kinds = ("sliding_attention", "chunked_attention") if size else ("linear_attention",)
            sees_all = [kind == _FULL for kind in self.kinds("layer_types", (_FULL, *limited_kinds))]
            if len(sees_all) != num_layers:
                raise InputError(f"layer_types has {len(sees_all)} entries, the model has {num_layers} layers")
        elif "full_layers" in rule and self.get(rule["full_layers"]) not in (_ABSENT, None):
            numbers = self.get(rule["full_layers"])  # from one
            sees_all = [at + 1 in numbers for at in range(num_layers)] if isinstance(numbers, list) else []
            if not any(sees_all):
                raise InputError(f"{rule['full_layers']} must be a list of layer numbers, got {_show(numbers)}")
        elif "first" in rule:
            first = self.count(rule["first"])
            sees_all = [at < first for at in range(num_layers)]
        else:
            interval = rule.get("full_every", 0)
            interval = self.count(interval) if isinstance(interval, str) else interval
            last = 0 if rule.get("full_first") else interval - 1
            sees_all = [bool(interval) and at % interval == last for at in range(num_layers)]
        if all(sees_all):
            return {}
        full = [at for at, sees in enumerate(sees_all) if sees]
        interval = (full[0] + 1 if len(full) == 1 else full[1] - full[0]) if full else 0
        offset = interval - 1 - full[0] if full else 0
        if full and (offset < 0 or sees_all != [(at + 1 + offset) % interval == 0 for at in range(num_layers)]):
            limited, moe = "W" if size else "L", Experts(**sizes["moe"]) if "moe" in sizes else None
            second = ["E" if moe and moe.has_layer(at) else "-" for at in range(num_layers)]
            pattern = "".join(
                ("*" if sees else limited) + behind for sees, behind in zip(sees_all, second, strict=True)
            )
            return {"layer_pattern": pattern, "num_layers": 2 * num_layers} | ({"window": size} if size else {})
        fields = {"full_attention_interval": interval, "full_attention_offset": offset}
        return fields | ({"window": size} if size else {})

    def expert_layers(self, num_layers: int) -> dict[str, int]:
        """`num_dense_layers` or `interval`, where the file lists layers by number."""
        if self.get("mlp_layer_types") not in (_ABSENT, None):
            sparse = [kind == "sparse" for kind in self.kinds("mlp_layer_types", ("dense", "sparse"))]
            if sparse == sorted(sparse):
                return {"num_dense_layers": sparse.count(False)}
        for key in ("mlp_only_layers", "moe_layers"):
            listed = self.get(key)
            if listed is _ABSENT or listed is None or (listed == [] and key == "mlp_only_layers"):
                continue
            if not isinstance(listed, list) or not all(type(item) is int for item in listed) or not listed:
                raise InputError(f"{key} must be a list of layer numbers, got {_show(listed)}")
            if key == "mlp_only_layers" and listed == list(range(len(listed))):
                return {"num_dense_layers": len(listed)}
            if key == "moe_layers" and listed == list(range(listed[0], num_layers, listed[0] + 1)):
                return {"interval": listed[0] + 1}
            raise InputError(f"{key} = {_show(listed)}: only the first layers, or every n-th, can be told apart")
        return {}


def _computed(terms: list[str], kind: type, look_up: Callable[[str], Any]) -> Any:
    """The value of `key`, of a product, sum or quotient of two keys or numbers; `_ABSENT` where a key has none."""
    values = [int(term) if term.isdigit() else _typed(term, look_up(term), kind) for term in terms[::2]]
    if any(value is _ABSENT for value in values):
        return _ABSENT
    if len(values) == 1:
        return values[0]
    if terms[1] == "//":
        return values[0] // values[1] if values[1] else _ABSENT
    return math.prod(values) if terms[1] == "*" else sum(values)


def _typed(key: str, value: Any, kind: type) -> Any:
    """`value` if it is of the type that the field has; null is no value."""
    if value is _ABSENT or value is None:
        return _ABSENT
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is bool and not isinstance(value, bool):
        raise InputError(f"{key} must be true or false, got {_show(value)}")
    if kind is str and not isinstance(value, str):
        raise InputError(f"{key} must be text, got {_show(value)}")
    if kind is int and not (is_number and isinstance(value, int) and 0 <= value <= MOST):
        raise InputError(f"{key} must be a whole number from 0 to {MOST}, got {_show(value)}")
    if kind is float and not (is_number and 0 < value <= 1e18):
        raise InputError(f"{key} must be a positive finite number, got {_show(value)}")
    return value
