"""Options of pipeline stages: how layers are distributed, for writing and reading."""

from __future__ import annotations

from autoplan.base.errors import InputError
from autoplan.frameworks.common.option_table import Fields, Option, Value
from autoplan.frameworks.megatron_lm.notation import MAX_LAYERS, layout_counts, pipeline_layout
from autoplan.frameworks.megatron_lm.table import BRIDGE, Line, Reading, Special, switches, valued
from autoplan.spec.plan import chunk_layers, even_chunks
from autoplan.spec.plan_file import PlanFile


def _write_stages(file: PlanFile) -> dict[str, Value]:
    plan, model = file.best.plan, file.model
    counts = chunk_layers(plan, model.num_layers)
    if len(set(counts)) > 1:
        return {"pipeline_model_parallel_layout": pipeline_layout(counts, model.num_mtp_layers)}
    return {"num_virtual_stages_per_pipeline_rank": plan.vp} if plan.vp > 1 else {}


def _read_stages(reading: Reading) -> Fields:
    """Read the chunks per rank, and the layers of every chunk if they are distributed unevenly."""
    arguments, pp = reading.arguments, reading.fields["pp"]
    assert reading.model is not None
    num_layers = reading.model.num_layers
    layout = arguments.value("pipeline_model_parallel_layout")
    per_chunk = arguments.optional_count("num_layers_per_virtual_pipeline_stage")
    chunks = arguments.optional_count("num_virtual_stages_per_pipeline_rank") or arguments.optional_count(
        "virtual_pipeline_model_parallel_size"
    )
    first, last = (arguments.optional_count(f"decoder_{end}_pipeline_num_layers") for end in ("first", "last"))
    embeds = arguments.flag("account_for_embedding_in_pipeline_split")
    loses = arguments.flag("account_for_loss_in_pipeline_split")
    if layout is not None:
        counts, option = layout_counts(layout), arguments.name("pipeline_model_parallel_layout")
        if len(counts) % pp:
            raise InputError(f"{option} has {len(counts)} stages, pp is {pp}")
        if sum(counts) != num_layers:
            raise InputError(f"{option} has {sum(counts)} layers, the model {num_layers}")
        return _stages(len(counts) // pp, counts)
    if pp == 1:
        return {}
    if per_chunk:
        chunks = max(num_layers // pp // per_chunk, 1)
    vp = chunks or 1
    if not 1 <= vp * pp <= 10 * MAX_LAYERS:
        raise InputError(f"pp {pp} x {vp} chunks are more than {10 * MAX_LAYERS:,}")
    if first is None and last is None and arguments.is_partial and (num_layers + embeds + loses) % (pp * vp):
        arguments.remark(
            "pipeline_model_parallel_size", f"{num_layers} layers are spread as evenly as {pp * vp} chunks go"
        )
        return _stages(vp, list(even_chunks(num_layers, pp * vp)))
    if first is None and last is None:
        return _stages(vp, _even_counts(num_layers, pp * vp, embeds=embeds, loses=loses))
    ends = (first or 0) + (last or 0)
    middle = pp - (first is not None) - (last is not None)
    layers_per_stage = (num_layers - ends) // middle if middle > 0 else 0
    stages = [
        *([first] if first is not None else []),
        *[layers_per_stage] * middle,
        *([last] if last is not None else []),
    ]
    if sum(stages) != num_layers or len(stages) != pp or any(count % vp for count in stages):
        raise InputError(
            f"{num_layers} layers do not spread over {pp} stages of {vp} chunks with {first} and {last} at the ends"
        )
    return _stages(vp, [count // vp for _ in range(vp) for count in stages])


def _even_counts(num_layers: int, num_chunks: int, *, embeds: bool, loses: bool) -> list[int]:
    """Return the layers of every chunk; embedding and loss may each count as a layer."""
    num_counted = num_layers + embeds + loses
    if num_counted % num_chunks:
        counted = ", embedding or loss counted," if embeds or loses else ""
        raise InputError(
            f"{num_counted} layers{counted} do not spread evenly over {num_chunks} chunks, which Megatron refuses"
        )
    counts = [num_counted // num_chunks] * num_chunks
    counts[0] -= embeds
    counts[-1] -= loses
    return counts


def _stages(vp: int, counts: list[int]) -> Fields:
    """Return the plan fields for chunks per rank and layers per chunk; the latter is empty for an even distribution."""
    is_even = tuple(counts) == even_chunks(sum(counts), len(counts))
    return {"vp": vp, "layers_per_chunk": None if is_even else tuple(counts)}


_BESIDE = (
    Option("num_virtual_stages_per_pipeline_rank", names={BRIDGE: "model.virtual_pipeline_model_parallel_size"}),
    Option("decoder_first_pipeline_num_layers", names={BRIDGE: "model.num_layers_in_first_pipeline_stage"}),
    Option("decoder_last_pipeline_num_layers", names={BRIDGE: "model.num_layers_in_last_pipeline_stage"}),
    *valued("num_layers_per_virtual_pipeline_stage"),
    *switches("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)
LAYOUT: Line = (Special("pipeline_model_parallel_layout", _write_stages, _read_stages, companions=_BESIDE),)
