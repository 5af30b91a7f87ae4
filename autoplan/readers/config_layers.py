"""Blocks in the layers of a Hugging Face config.json: hybrids, attention windows, experts."""

from __future__ import annotations

from typing import Any

from autoplan.base.errors import InputError
from autoplan.readers.config_keys import ABSENT, Keys, key_table, show, typed
from autoplan.spec.blocks import Experts


def layer_pattern(keys: Keys) -> str:
    """Return the layer pattern of a hybrid, from its text or its list of block types."""
    if "hybrid" in keys.rules:
        return _paired_pattern(keys, keys.rules["hybrid"])
    listed = keys.get("layers_block_type")
    if listed is ABSENT or listed is None:
        text = keys.value("", "layer_pattern", keys.rules["layer_pattern"])
        if text is ABSENT or not text:
            raise InputError("hybrid_override_pattern or layers_block_type is missing or empty")
        return str(text)
    symbols: dict[str, str] = key_table()["symbols"]
    return "".join(symbols[kind] for kind in keys.kinds("layers_block_type", tuple(symbols)))


def _paired_pattern(keys: Keys, rule: dict[str, str]) -> str:
    """Return the layer pattern of layers with Mamba or attention, followed by a feed-forward block or none."""
    num_layers = keys.value("", "num_layers", keys.rules.get("num_layers", "num_hidden_layers"))
    if "unit" in rule:
        return rule["unit"] * num_layers
    symbols: dict[str, str] = key_table()["symbols"]
    if "layers" in rule and keys.get(rule["layers"]) not in (ABSENT, None):
        symbols = symbols | {"attention": rule.get("attention_symbol", "*")}
        first = [symbols[kind] for kind in keys.kinds(rule["layers"], tuple(symbols))]
        if rule["layers"] == "block_types":  # the list repeats
            first = (first * num_layers)[:num_layers]
        if len(first) != num_layers:
            raise InputError(f"{rule['layers']} has {len(first)} entries, the model has {num_layers} layers")
    else:
        listed = keys.get(rule["attention"]) if "attention" in rule else ABSENT
        numbers = [] if listed is ABSENT or listed is None else listed
        if not isinstance(numbers, list) or not all(type(item) is int for item in numbers):
            raise InputError(f"{rule['attention']} must be a list of layer numbers, got {show(numbers)}")
        first = [
            rule.get("attention_symbol", "*") if at in numbers else rule.get("other", "M") for at in range(num_layers)
        ]
    if "attention_every" in rule:
        attends, routes = (_every(keys, rule[key], num_layers) for key in ("attention_every", "experts_every"))
        return "".join("M*"[attends[at]] + "-E"[routes[at]] for at in range(num_layers))
    has_experts = "experts" in rule and typed(rule["experts"], keys.assumed(rule["experts"]), int)
    second = "E" if has_experts and has_experts is not ABSENT else rule.get("second", "")
    return "".join(symbol + second for symbol in first)


def _every(keys: Keys, names: str, num_layers: int) -> list[bool]:
    """Return which layers match a period and an offset, given under two keys."""
    period, offset = (keys.count(name) for name in names.split())
    return [bool(period) and at % period == offset for at in range(num_layers)]


def windows(keys: Keys, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return which layers have window or linear attention, and the window size.

    The order is regular, or a `layer_pattern` in `sizes` with two symbols per layer.
    """
    num_layers = sizes["num_layers"]
    rule = keys.rules.get("window")
    if not isinstance(rule, dict) or (
        "switch" in rule and typed(rule["switch"], keys.assumed(rule["switch"]), bool) is not True
    ):
        return {}
    size = keys.sized(rule["size"]) if rule.get("size") else 0
    if size is ABSENT or not num_layers:
        return {}
    symbols = _named_kinds(keys, size, sizes) if keys.get("layer_types") not in (ABSENT, None) else []
    sees_all = [symbol == "*" for symbol in symbols] or _full_layers(keys, rule, num_layers)
    if all(sees_all):
        return {}
    full = [at for at, sees in enumerate(sees_all) if sees]
    interval = (full[0] + 1 if len(full) == 1 else full[1] - full[0]) if full else 0
    offset = interval - 1 - full[0] if full else 0
    is_mixed = len({*symbols} - {"*"}) > 1 or "C" in symbols
    if is_mixed or (
        full and (offset < 0 or sees_all != [(at + 1 + offset) % interval == 0 for at in range(num_layers)])
    ):
        limited, moe = "W" if size else "L", Experts(**sizes["moe"]) if "moe" in sizes else None
        second = ["E" if moe and moe.has_layer(at) else "-" for at in range(num_layers)]
        symbols = symbols or ["*" if sees else limited for sees in sees_all]
        pattern = "".join(symbol + behind for symbol, behind in zip(symbols, second, strict=True))
        return {"layer_pattern": pattern, "num_layers": 2 * num_layers} | ({"window": size} if size else {})
    fields = {"full_attention_interval": interval, "full_attention_offset": offset}
    return fields | ({"window": size} if size else {})


def _named_kinds(keys: Keys, size: int, sizes: dict[str, Any]) -> list[str]:
    """Return the symbol of every layer by its name in `layer_types`."""
    needs = {"*": True, "W": size, "L": "linear_attention" in sizes, "C": "short_conv_kernel" in sizes}
    words = {word: symbol for word, symbol in key_table()["layer_types"].items() if needs[symbol]}
    symbols = [words[kind] for kind in keys.kinds("layer_types", tuple(words))]
    if len(symbols) != sizes["num_layers"]:
        raise InputError(f"layer_types has {len(symbols)} entries, the model has {sizes['num_layers']} layers")
    return symbols


def _full_layers(keys: Keys, rule: dict[str, Any], num_layers: int) -> list[bool]:
    """Return which layers attend to all positions by a rule on their numbers."""
    if "full_layers" in rule and keys.get(rule["full_layers"]) not in (ABSENT, None):
        numbers = keys.get(rule["full_layers"])  # counted from one
        sees_all = [at + 1 in numbers for at in range(num_layers)] if isinstance(numbers, list) else []
        if not any(sees_all):
            raise InputError(f"{rule['full_layers']} must be a list of layer numbers, got {show(numbers)}")
        return sees_all
    if "first" in rule:
        first = keys.number(rule["first"])
        return [at < first for at in range(num_layers)]
    interval = rule.get("full_every", 0)
    interval = keys.count(interval) if isinstance(interval, str) else interval
    last = 0 if rule.get("full_first") else interval - 1
    return [bool(interval) and at % interval == last for at in range(num_layers)]


def expert_layers(keys: Keys, num_layers: int) -> dict[str, int]:
    """Return `num_dense_layers` or `interval` if the file lists layers by number."""
    if keys.get("mlp_layer_types") not in (ABSENT, None):
        sparse = [kind == "sparse" for kind in keys.kinds("mlp_layer_types", ("dense", "sparse"))]
        if sparse == sorted(sparse):
            return {"num_dense_layers": sparse.count(False)}
    for key in ("mlp_only_layers", "moe_layers"):
        listed = keys.get(key)
        if listed is ABSENT or listed is None or (listed == [] and key == "mlp_only_layers"):
            continue
        if not isinstance(listed, list) or not all(type(item) is int for item in listed) or not listed:
            raise InputError(f"{key} must be a list of layer numbers, got {show(listed)}")
        if key == "mlp_only_layers" and listed == list(range(len(listed))):
            return {"num_dense_layers": len(listed)}
        if key == "moe_layers" and listed == list(range(listed[0], num_layers, listed[0] + 1)):
            return {"interval": listed[0] + 1}
        raise InputError(f"{key} = {show(listed)}: only the first layers, or every n-th, are supported")
    return {}
