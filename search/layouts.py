"""Layouts of a model's layers over stages and chunks, and the schedules that run them."""

from __future__ import annotations

from functools import lru_cache

from autoplan.search.limits import Limits, divisors
from autoplan.spec.axes import V_SHAPED
from autoplan.spec.enums import Schedule
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import even_chunks

# Schedules with one chunk per rank, and with any number; those with two in a V are `V_SHAPED`.
_ONE_CHUNK, _MANY_CHUNKS = (Schedule.ONE_F_ONE_B, Schedule.GPIPE, Schedule.ZB_H1), (Schedule.INTERLEAVED,)


@lru_cache(maxsize=4096)
def chunk_counts(num_layers: int, pp: int, *, is_uneven: bool = False) -> tuple[int, ...]:
    """Return interleaving degrees to search: divisors of a rank's layers, or all if stages may be uneven.

    The layers per rank are rounded up, also with embedding and head counted as layers, as in Llama 3 405B: 126 layers
    on 16 ranks give 8 per rank and 8 chunks, of which the first and the last have no layer.
    """
    if pp == 1:
        return (1,)
    if is_uneven:
        return tuple(range(1, (num_layers + 2) // pp + 1))
    per_rank = {-(-num_layers // pp), -(-(num_layers + 2) // pp)}
    return tuple(sorted({vp for layers in per_rank for vp in divisors(layers) if pp * vp <= num_layers + 2}))


@lru_cache(maxsize=4096)
def layouts(
    num_layers: int, pp: int, vp: int, num_mtp_layers: int = 0, fewer_at_ends: int = 1
) -> tuple[tuple[int, ...], ...]:
    """Return layers per chunk: spread evenly, and with embedding and head counted as layers.

    The head counts as one layer, or as one plus the prediction layers before it; the embedding as none or one; or each
    as up to `fewer_at_ends`.  Only the end chunks may be without layers, and every rank has a layer.
    """
    chunks = pp * vp
    chunkings = [even_chunks(num_layers, chunks)]
    if pp > 1:
        for behind in sorted({*range(1, fewer_at_ends + 1), 1 + num_mtp_layers}):
            for before in range(fewer_at_ends + 1):
                even = even_chunks(num_layers + before + behind, chunks)
                chunkings.append((even[0] - before, *even[1:-1], even[-1] - behind))

    def usable(layout: tuple[int, ...]) -> bool:
        # Ranks with several chunks have one that is not an end.
        return min(layout) >= 0 and all(layout if vp == 1 else layout[1:-1])

    return tuple(dict.fromkeys(layout for layout in chunkings if usable(layout)))


@lru_cache(maxsize=4096)
def searched_layouts(limits: Limits, model: ModelSpec, pp: int) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """Return (chunks per rank, schedule, layers of every chunk) of the layouts on this many stages."""
    return tuple(
        (vp, schedule.code, layout)
        for vp in ((1,) if limits.split else chunk_counts(model.num_layers, pp, is_uneven=limits.fewer_at_ends > 1))
        if limits.admits("vp", vp)
        for layout in (
            (limits.split(model, pp),)
            if limits.split
            else layouts(model.num_layers, pp, vp, model.num_mtp_layers, limits.fewer_at_ends)
        )
        for schedule in schedules_of(limits, pp, vp)
    )


def schedules_of(limits: Limits, pp: int, vp: int) -> tuple[Schedule, ...]:
    """Return the schedules for this many stages and chunks; a single stage has no pipeline and uses 1F1B."""
    if pp == 1:
        exist: tuple[Schedule, ...] = _ONE_CHUNK[:1]
    elif vp == 1:
        exist = _ONE_CHUNK
    else:
        exist = _MANY_CHUNKS + (V_SHAPED if vp == 2 else ())
    return tuple(name for name in exist if name in limits.of("schedule"))
