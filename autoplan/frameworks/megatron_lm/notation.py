"""Megatron-LM's notations for the layers of pipeline stages and for MoE layers."""

from __future__ import annotations

import ast
import re
from itertools import groupby

from autoplan.base.errors import InputError
from autoplan.frameworks.common.option_table import Value
from autoplan.spec.blocks import Block
from autoplan.spec.enums import CudaGraphs
from autoplan.spec.model import ModelSpec

MAX_LAYERS = 10**4


def pipeline_layout(counts: tuple[int, ...], num_mtp_layers: int = 0) -> str:
    """Return the layout for the layer counts of all chunks: (3, 4, 4, 2) is 'Et*3|(t*4|)*2t*2L'."""
    texts = [_times("t", count) for count in counts]
    texts[0] = f"E{texts[0]}"
    texts[-1] += _times("m", num_mtp_layers) + "L"
    chunks = [f"{text}|" for text in texts[:-1]] + texts[-1:]
    runs = [(text, len(list(run))) for text, run in groupby(chunks)]
    return "".join(text if times == 1 else f"({text})*{times}" for text, times in runs)


def _times(symbol: str, count: int) -> str:
    return symbol if count == 1 else f"{symbol}*{count}" if count else ""


def layout_counts(layout: Value) -> list[int]:
    """Return the layer counts of all chunks of a layout, written as 'Et*3|(t*4|)*2t*2L' or as lists of names."""
    if isinstance(layout, (list, tuple)):
        return [sum(str(name).rpartition(".")[2] == "decoder" for name in chunk) for chunk in layout]
    text = re.sub(r"[\s,]", "", str(layout))
    repeats = re.compile(r"\(([^()]*)\)\*(\d{1,4})|([EtmL])\*(\d{1,4})")
    for _ in range(MAX_LAYERS):
        match = repeats.search(text)
        if match is None:
            break
        text = text[: match.start()] + (match[1] or match[3] or "") * int(match[2] or match[4]) + text[match.end() :]
        if len(text) > 4 * MAX_LAYERS:
            break
    if not re.fullmatch(r"[EtmL|]+", text) or len(text) > 4 * MAX_LAYERS:
        raise InputError(f"pipeline layout {str(layout)[:60]!r} is not in the notation Et*3|t*4|t*2L")
    return [chunk.count("t") for chunk in text.split("|")]


def expert_pattern(model: ModelSpec) -> str:
    """Return the pattern of MoE layers as a sum of lists: ([0]*3+[1]*58)."""
    places = [int(Block.MOE in layer) for layer in model.layers]
    return f"({'+'.join(f'[{place}]*{len(list(run))}' for place, run in groupby(places))})"


def moe_places(pattern: Value, num_layers: int) -> tuple[int, int]:
    """Return (dense layers before the first MoE layer, interval) of a frequency or pattern of MoE layers."""
    if isinstance(pattern, str) and re.fullmatch(r"\d{1,5}", pattern.strip(), re.ASCII):
        pattern = int(pattern)
    if isinstance(pattern, int) and not isinstance(pattern, bool):
        if pattern == 1:
            return 0, 1
        places = [int(pattern > 0 and at % pattern == 0) for at in range(num_layers)]
    elif isinstance(pattern, str):
        places = _places(pattern)
    else:
        places = list(pattern) if isinstance(pattern, (list, tuple)) else []
    if len(places) != num_layers or set(places) - {0, 1} or 1 not in places:
        raise InputError(f"moe_layer_freq {str(pattern)[:60]!r} does not name the {num_layers} layers: pass --model")
    first = places.index(1)
    for interval in range(1, num_layers + 1):
        for dense in (0, first):
            if places == [int(at >= dense and (at + 1) % interval == 0) for at in range(num_layers)]:
                return dense, interval
    raise InputError(f"moe_layer_freq {str(pattern)[:60]!r}: such a mixture of layers is not known here")


def _places(text: str) -> list[int]:
    """Evaluate a sum and product of lists such as ([0]*3+[1]*58); the result is empty for other text."""

    def value(node: ast.expr) -> list[int] | int:
        match node:
            case ast.Constant(value=int() as number) if 0 <= number <= MAX_LAYERS:
                return number
            case ast.List(elts=items):
                return [number for item in items for number in [value(item)] if isinstance(number, int)]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                a, b = value(left), value(right)
                if isinstance(a, list) and isinstance(b, list):
                    return a + b
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                a, b = value(left), value(right)
                if isinstance(a, int) and isinstance(b, list):
                    a, b = b, a
                if isinstance(a, list) and isinstance(b, int) and len(a) * b <= MAX_LAYERS:
                    return a * b
        raise ValueError

    try:
        result = value(ast.parse(text.strip()[:4000], mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        result = []
    return result if isinstance(result, list) else []


# CUDA graph scopes that each choice adds to the previous one (core/transformer/cuda_graph_config.py).
GRAPH_SCOPES: dict[CudaGraphs, tuple[str, ...]] = {
    CudaGraphs.ROUTER: ("moe_router", "moe_preprocess"),
    CudaGraphs.ATTENTION: ("attn",),
    CudaGraphs.LAYER: ("mlp", "mamba"),
}
_SCOPE_OF = {
    Block.ATTENTION: "attn",
    Block.WINDOW_ATTENTION: "attn",
    Block.LINEAR_ATTENTION: "attn",
    Block.MLP: "mlp",
    Block.MAMBA: "mamba",
}


def graph_scopes(graphs: CudaGraphs, model: ModelSpec) -> list[str]:
    """Return the CUDA graph scopes for the blocks of a model."""
    model_scopes = _known_scopes(model)
    return [
        scope
        for level, scopes in GRAPH_SCOPES.items()
        if level.code <= graphs.code
        for scope in scopes
        if scope in model_scopes
    ]


def graphs_of(scopes: set[str], model: ModelSpec) -> CudaGraphs:
    """Return the largest choice of graphs whose scopes, as far as the model has them, are all in `scopes`."""
    model_scopes, graphs = _known_scopes(model), CudaGraphs.NONE
    if "full_iteration" in scopes:
        return CudaGraphs.FULL_ITERATION
    for level, level_scopes in GRAPH_SCOPES.items():
        if not model_scopes.intersection(level_scopes) <= scopes:
            break
        graphs = level if scopes & model_scopes else graphs
    return graphs


def _known_scopes(model: ModelSpec) -> set[str]:
    blocks = {block for layer in model.layers for block in layer}
    scopes = {_SCOPE_OF[block] for block in blocks & _SCOPE_OF.keys()}
    return scopes | ({"moe_router", "moe_preprocess"} if Block.MOE in blocks else set())
