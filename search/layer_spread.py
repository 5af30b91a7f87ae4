"""Spread of layers over pipeline ranks for all plans of a kind, from which bounds count layers.

Layers are distinguished by their blocks; arrays of layers have a last axis with one element per sort of layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from autoplan.base.arrays import Bools, Floats, Ints, distinct_rows
from autoplan.cost.pipeline.layout import V_SCHEDULES
from autoplan.search.space import Inside
from autoplan.spec.enums import Schedule
from autoplan.spec.model import ModelSpec

ONE_FORWARD_ONE_BACKWARD = tuple(Schedule(name).code for name in ("1f1b", "interleaved"))
PARTS = 8  # parts into which a kind's plans are divided by recomputation


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spread:
    """Layers of each sort on the decisive ranks, and the number of fully recomputed ones.

    Shape (plans of a kind, sorts).  For several plans together each figure is the minimum.
    """

    first: Floats  # on the first rank
    kept_first: Floats  # of these, not fully recomputed
    # On the second rank, which has no embedding and often more layers; on the innermost one if ranks are folded.
    second: Floats
    kept_second: Floats
    last: Floats  # on the rank with the head
    heaviest: Floats  # on the rank with the most layers except the last rank, the later one of equals
    before: Floats  # on the ranks before the heaviest one
    ahead: Floats  # on the ranks before the one with the head, which has the last layers; 0 if ranks are folded
    repeated: Floats  # in the whole model
    repeated_first: Floats
    repeated_second: Floats
    repeated_last: Floats
    repeated_heaviest: Floats
    # Shape (plans of a kind):
    rank: Ints  # the heaviest rank, -1 if unknown
    vp: Ints  # largest number of chunks per rank
    fewest_vp: Ints
    has_path: Bools  # whether the schedule is 1F1B, plain or interleaved, so that its closed form applies
    is_folded: Bools  # whether the first rank also has the last chunk, of which few passes may be alive
    is_flat: Bools  # whether no backward pass begins before the last forward pass

    def parted(self) -> Spread:
        """Return minima over parts of the plans, which are similar in chunks, recomputation and form; one row each."""
        log_chunks = np.ceil(np.log2(self.vp)).astype(np.int64)
        share = np.ceil(PARTS * self.repeated.sum(axis=1) / np.maximum(self.repeated.sum(axis=1).max(), 1))
        _, part = distinct_rows(log_chunks, share.astype(np.int64), self.has_path, self.is_folded, self.is_flat)
        order = np.argsort(part, kind="stable")
        starts = np.flatnonzero(np.diff(part[order], prepend=-1))

        def least(name: str) -> Any:
            return np.minimum.reduceat(getattr(self, name)[order], starts)

        return Spread(
            **{name: least(name) for name in FIGURES},
            rank=np.full(len(starts), -1),
            vp=np.maximum.reduceat(self.vp[order], starts),
            fewest_vp=least("vp"),
            has_path=least("has_path"),
            is_folded=least("is_folded"),
            is_flat=least("is_flat"),
        )


FIGURES: tuple[str, ...] = Spread.__slots__[: Spread.__slots__.index("rank")]


@lru_cache(maxsize=4096)
def spread_of(model: ModelSpec, inside: Inside) -> Spread:
    """Return the figures of all plans in some kinds."""
    is_folded = np.isin(inside.schedule, V_SCHEDULES)
    table = np.empty((len(FIGURES), len(inside), len(model.layer_kinds)))
    rank = np.empty(len(inside), dtype=np.int64)
    first, layout_of = distinct_rows(inside.layout, is_folded)
    of_layout = np.argsort(layout_of, kind="stable")
    for example, plans in zip(first, np.split(of_layout, np.cumsum(np.bincount(layout_of))[:-1]), strict=True):
        layers = inside.layouts[inside.layout[example]]
        figures, rank[plans] = _figures(model, layers, inside.pp, is_folded=bool(is_folded[example]))
        table[:, plans] = figures[:, np.minimum(inside.recompute_num_layers[plans], max(layers))]
    return Spread(
        **dict(zip(FIGURES, table, strict=True)),
        rank=rank,
        vp=inside.vp,
        fewest_vp=inside.vp,
        has_path=np.isin(inside.schedule, ONE_FORWARD_ONE_BACKWARD),
        is_folded=is_folded,
        is_flat=inside.schedule == Schedule.GPIPE.code,
    )


@lru_cache(maxsize=16384)
def _figures(model: ModelSpec, layout: tuple[int, ...], pp: int, *, is_folded: bool) -> tuple[Floats, int]:
    """Return (`FIGURES` of a layout, its heaviest rank): shape (figures, recomputed layers per chunk, sorts)."""
    layers, total, numbers = np.array(layout), _layers_before(model), np.arange(max(layout) + 1)
    starts = np.cumsum(layers) - layers
    on_rank = _by_rank(total[starts + layers] - total[starts], pp, is_folded=is_folded)
    again = _by_rank(total[starts + np.minimum(layers, numbers[:, None])] - total[starts], pp, is_folded=is_folded)
    head, behind = (0, pp - 1) if is_folded else (pp - 1, min(1, pp - 1))
    not_last = on_rank[: max(pp - 1, 1)].sum(axis=1)
    rank = len(not_last) - 1 - int(np.argmax(not_last[::-1]))
    figures = {
        "first": on_rank[0],
        "kept_first": on_rank[0] - again[:, 0],
        "second": on_rank[behind],
        "kept_second": on_rank[behind] - again[:, behind],
        "last": on_rank[head],
        "heaviest": on_rank[rank],
        "before": on_rank[:rank].sum(axis=0),
        "ahead": 0 * on_rank[0] if is_folded else (total[starts + layers] - total[starts])[: pp - 1].sum(axis=0),
        "repeated": again.sum(axis=1),
        "repeated_first": again[:, 0],
        "repeated_second": again[:, behind],
        "repeated_last": again[:, head],
        "repeated_heaviest": again[:, rank],
    }
    table = np.empty((len(FIGURES), len(numbers), total.shape[1]))
    for at, name in enumerate(FIGURES):
        table[at] = figures[name]
    return table, rank


@lru_cache(maxsize=64)
def _layers_before(model: ModelSpec) -> Ints:
    """Number of layers of each sort among the first n: shape (layers + 1, sorts)."""
    kind_of_layer = np.array([model.layer_kinds.index(layer) for layer in model.layers])
    total = np.zeros((model.num_layers + 1, len(model.layer_kinds)), dtype=np.int64)
    np.cumsum(kind_of_layer[:, None] == np.arange(total.shape[1]), axis=0, out=total[1:])
    return total


def _by_rank(chunks: Ints, pp: int, *, is_folded: bool) -> Ints:
    """Sums over the chunks of every rank: chunk i is on rank i mod pp, or folded back from the last rank."""
    rounds = chunks.reshape(*chunks.shape[:-2], -1, pp, chunks.shape[-1])
    return rounds[..., 0, :, :] + rounds[..., 1, ::-1, :] if is_folded else rounds.sum(axis=-3)
