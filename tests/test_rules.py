"""Do the rules of torchtitan, nanotron, DeepSpeed and plain PyTorch refuse what each is about, and say so?"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

import autoplan
from autoplan.frameworks.common import universal_rules as universal
from autoplan.frameworks.common.rules import ANY_FRAMEWORK, Rule, Rulebook, broken, legal
from autoplan.frameworks.deepspeed import rules as deepspeed
from autoplan.frameworks.fsdp2 import rules as fsdp2
from autoplan.frameworks.nanotron import rules as nanotron
from autoplan.frameworks.presets import load_framework, preset_frameworks
from autoplan.frameworks.registry import BOOKS, book_of
from autoplan.frameworks.torchtitan import rules as torchtitan
from autoplan.spec.axes import AXES, shown, words_of
from autoplan.spec.axis import Axis, Kind, Value
from autoplan.spec.blocks import Experts
from autoplan.spec.enums import Schedule
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.training import TrainingSpec
from autoplan.spec.workload import Workload

DENSE = ModelSpec(
    name="dense", num_layers=24, hidden_size=4096, vocab_size=32000, num_heads=32, num_kv_heads=8, ffn_size=14336
)
MOE = replace(DENSE, name="moe", moe=Experts(num_experts=8, experts_per_token=2, expert_ffn_size=1536))
TIED = replace(DENSE, name="tied", tied_embeddings=True)
SIX_GROUPS = replace(DENSE, num_heads=12, num_kv_heads=6, head_dim=128)

Case = tuple[ModelSpec, ParallelPlan, int, str]


def workload_of(model: ModelSpec, plan: ParallelPlan, seq_len: int = 4096) -> Workload:
    return Workload(model=model, training=TrainingSpec(seq_len=seq_len), num_devices=plan.num_devices)


def plan_of(**changes: Any) -> ParallelPlan:
    return ParallelPlan(**{"global_batch": 64, "sharding": "none", **changes})


def split(pp: int, **changes: Any) -> ParallelPlan:
    """A plan on the stages that nanotron makes of `DENSE`."""
    return plan_of(pp=pp, layers_per_chunk=nanotron.layers_per_stage(DENSE, pp), **changes)


PIPELINES: tuple[Case, ...] = (
    (DENSE, plan_of(pp=2, schedule="interleaved"), 4096, "schedule 'interleaved' with vp 1"),
    (DENSE, plan_of(schedule="gpipe"), 4096, "schedule 'gpipe' needs pp > 1"),
    (DENSE, plan_of(pp=8, global_batch=7), 4096, "1f1b needs at least pp 8 micro-batches, there are 7"),
    (DENSE, plan_of(pp=4, vp=2, schedule="interleaved", global_batch=10), 4096, "in multiples of pp 4, there are 10"),
    (DENSE, plan_of(pp=4, schedule="zb-h1", global_batch=9), 4096, "zb-h1 needs 9 micro-batches divisible"),
)


def other_value(axis: Axis) -> Value | int:
    """A value of an option that is not its default."""
    if axis.kind is Kind.COUNT:
        return 2 if axis.default == 1 else 50
    return words_of(axis.name)[-1] if axis.enum else not axis.default


def options_of_others(book: Rulebook, *but: str) -> tuple[Case, ...]:
    """One plan for every option that few frameworks offer and this one does not."""
    asked = [axis for axis in AXES if axis.offered_by and axis.name not in (*book.extras, *but)]
    values = {axis.name: other_value(axis) for axis in asked}
    return tuple(
        (DENSE, plan_of(**{name: value}), 4096, f"{name if value is True else f'{name} {shown(value)}'} is known of")
        for name, value in values.items()
    )


# (model, plan, sequence length, what is said): legal except for one rule, and one for every rule.
BREAKING: dict[str, tuple[Rulebook, tuple[Case, ...]]] = {
    "torchtitan": (
        torchtitan.BOOK,
        (
            *options_of_others(torchtitan.BOOK),
            (DENSE, plan_of(dp_replicate=4, sharding="zero3"), 1024, "zero3 over one rank has nothing to shard"),
            (DENSE, plan_of(dp_shard=8, main_weights="fp16"), 4096, "main_weights 'fp16' does not exist"),
            (DENSE, plan_of(dp_shard=8, reduce_dtype="fp32"), 4096, "'fp32' does not exist: use 'usual' or 'half'"),
            (
                DENSE,
                plan_of(dp_shard=8, fp8_scaling="rowwise"),
                4096,
                "fp8_scaling rowwise needs precision fp8, it is bf16",
            ),
            (DENSE, plan_of(dp_shard=8, precision="fp8", fp8_scaling="delayed"), 4096, "'delayed' does not exist"),
            *PIPELINES,
            (MOE, plan_of(recompute="selective", recompute_modules=("moe_act",)), 4096, "recompute of moe_act"),
            (DENSE, plan_of(recompute="full", recompute_num_layers=2), 4096, "recompute of 2 layers of a chunk"),
            (DENSE, plan_of(dp_shard=8, sharding="zero1"), 4096, "use 'none' or 'zero2' or 'zero3'"),
            (DENSE, plan_of(cp=2, sharding="zero3", cp_kind="all_to_all"), 4096, "cp_kind 'all_to_all' does not exist"),
            (DENSE, plan_of(dp_shard=2, sharding="zero3", offload="optimizer"), 4096, "offload 'optimizer'"),
            (DENSE, plan_of(precision="fp16"), 4096, "precision 'fp16' does not exist"),
            (TIED, plan_of(pp=2), 4096, "tied embeddings need pp 1, pp is 2"),
            (DENSE, plan_of(pp=2, dp_shard=2, sharding="zero2"), 4096, "zero2 with pp 2"),
            (SIX_GROUPS, plan_of(tp=4), 4096, "num_kv_heads 6 must be divisible by tp 4"),
            (DENSE, plan_of(sp=True), 4096, "sp needs tp > 1"),
            (DENSE, plan_of(tp=4, sp=True, cp=2, sharding="zero3"), 4104, "seq_len 4104 must be divisible"),
            (DENSE, plan_of(cp=2), 4096, "cp 2 needs sharded states, sharding is none"),
            (MOE, plan_of(ep=8, dp_shard=4, dp_replicate=2, sharding="zero3"), 4096, "ep 8 must divide the ranks"),
            (MOE, plan_of(tp=2, ep=2, etp=2, dp_shard=2), 4096, "set etp to 1"),
            (replace(DENSE, ffn_size=4104), plan_of(precision="fp8"), 4096, "fp8 needs the widths"),
            (DENSE, plan_of(precision="mxfp8"), 4104, "mxfp8 needs the 4104 tokens"),
            (replace(DENSE, ffn_size=14400), plan_of(precision="nvfp4"), 4096, "divisible by 128, with tp 1"),
            (replace(MOE, num_mtp_layers=1), plan_of(pp=2), 4096, "multi-token prediction with pp 2 and cp 1"),
            (replace(MOE, num_mtp_layers=1), plan_of(chunked_loss="chunks"), 4096, "chunked_loss with multi-token"),
            (DENSE, plan_of(chunked_loss="liger"), 4096, "chunked_loss 'liger' does not exist"),
            (
                DENSE,
                plan_of(chunked_loss="chunks"),
                4100,
                "chunked_loss needs the tokens of a micro-batch divisible by 8",
            ),
        ),
    ),
    "pytorch-fsdp": (
        fsdp2.BOOK,
        (
            *options_of_others(fsdp2.BOOK),
            (DENSE, plan_of(dp_shard=8, main_weights="fp16"), 4096, "main_weights 'fp16' does not exist"),
            (DENSE, plan_of(precision="fp16", main_weights="bf16"), 4096, "main_weights bf16 with precision fp16"),
            (DENSE, plan_of(dp_shard=8, reduce_dtype="half"), 4096, "'half' does not exist: use 'usual' or 'fp32'"),
            (DENSE, plan_of(dp_shard=8, precision="fp8", fp8_scaling="rowwise"), 4096, "'rowwise' does not exist"),
            (DENSE, plan_of(dp_shard=8, fp8_scaling="delayed"), 4096, "fp8_scaling delayed needs precision fp8"),
            *PIPELINES,
            (MOE, plan_of(recompute="selective", recompute_modules=("moe_act",)), 4096, "recompute of moe_act"),
            (DENSE, plan_of(dp_shard=8, sharding="zero1"), 4096, "use 'none' or 'zero2' or 'zero3'"),
            (DENSE, plan_of(cp=2, cp_kind="all_to_all"), 4096, "cp_kind 'all_to_all' does not exist: use 'ring'"),
            (DENSE, plan_of(dp_shard=2, sharding="zero3", offload="optimizer"), 4096, "offload 'optimizer'"),
            (DENSE, plan_of(precision="nvfp4"), 4096, "precision 'nvfp4' does not exist"),
            (TIED, plan_of(pp=2), 4096, "tied embeddings need pp 1, pp is 2"),
            (SIX_GROUPS, plan_of(tp=4), 4096, "num_kv_heads 6 must be divisible by tp 4"),
            (DENSE, plan_of(sp=True), 4096, "sp needs tp > 1"),
            (DENSE, plan_of(cp=8), 4104, "seq_len 4104 must be divisible"),
            (MOE, plan_of(ep=2, dp_shard=2), 4096, "ep 2 and etp 1: PyTorch has no style"),
            (replace(DENSE, ffn_size=4104), plan_of(precision="fp8"), 4096, "fp8 needs the widths"),
            (DENSE, plan_of(precision="mxfp8"), 4104, "mxfp8 needs the 4104 tokens"),
        ),
    ),
    "nanotron": (
        nanotron.BOOK,
        (
            *options_of_others(nanotron.BOOK, "ep_overlap"),
            (DENSE, plan_of(recompute="full", recompute_num_layers=2), 4096, "recompute of 2 layers of a chunk"),
            (DENSE, split(2, schedule="zb-h1"), 4096, "schedule 'zb-h1' does not exist: use '1f1b' or 'gpipe'"),
            (DENSE, plan_of(dp_shard=2, sharding="zero2"), 4096, "sharding 'zero2' does not exist"),
            (DENSE, plan_of(recompute="selective"), 4096, "recompute 'selective' does not exist"),
            (DENSE, plan_of(dp_shard=2, sharding="zero1", offload="optimizer"), 4096, "offload 'optimizer'"),
            (DENSE, plan_of(precision="fp8"), 4096, "precision 'fp8' does not exist"),
            (DENSE, plan_of(schedule="gpipe"), 4096, "schedule 'gpipe' needs pp > 1"),
            (DENSE, split(4, global_batch=2), 4096, "at least pp - 1 = 3 micro-batches, there are 2"),
            (
                DENSE,
                plan_of(pp=2, layers_per_chunk=(14, 10)),
                4096,
                "stages of 14,10 layers: it splits by cost into 13,11",
            ),
            (SIX_GROUPS, plan_of(tp=4), 4096, "num_kv_heads 6 must be divisible by tp 4"),
            (replace(DENSE, ffn_size=4098), plan_of(tp=4), 4096, "ffn_size 4098 must be divisible by tp 4"),
            (DENSE, plan_of(sp=True), 4096, "sp needs tp > 1"),
            (DENSE, plan_of(tp=4, sp=True), 4098, "with sp, seq_len 4098 must be divisible by tp 4"),
            (DENSE, plan_of(tp=4, tp_overlap=True), 4096, "tp_overlap needs sp"),
            (DENSE, plan_of(cp=2), 4096, "cp 2: runs with context parallelism do not start"),
            (MOE, plan_of(ep=2, dp_shard=2), 4096, "ep 2: runs with expert parallelism do not start"),
            (MOE, plan_of(etp=2, dp_shard=2), 4096, "etp 2: every rank has all experts"),
            (DENSE, plan_of(dp_replicate=2, dp_shard=2, sharding="zero1"), 4096, "zero1 shards over all replicas"),
        ),
    ),
    "deepspeed": (
        deepspeed.BOOK,
        (
            *options_of_others(deepspeed.BOOK),
            (DENSE, plan_of(dp_shard=8, main_weights="fp16"), 4096, "main_weights 'fp16' does not exist"),
            (DENSE, plan_of(dp_shard=8, grad_dtype="bf16_main"), 4096, "grad_dtype 'bf16_main' does not exist"),
            (DENSE, plan_of(dp_shard=8, sharding="zero2", quantized_gathers=True), 4096, "zero2 is over 8 of 8"),
            (DENSE, plan_of(dp_shard=8, sharding="zero3", secondary_shard=3), 4096, "secondary_shard 3"),
            (
                DENSE,
                plan_of(tp=2, dp_shard=8, sharding="zero3", quantized_reductions=True),
                4096,
                "zero3 is over 8 of 16",
            ),
            (
                DENSE,
                plan_of(dp_shard=8, sharding="zero2", offload="optimizer", offload_percent=57),
                4096,
                "offload_percent 57 needs zero3 and offload optimizer, they are zero2 and optimizer",
            ),
            (DENSE, plan_of(dp_shard=8, reduce_dtype="half"), 4096, "reduce_dtype 'half' does not exist"),
            (DENSE, plan_of(dp_shard=8, moment_dtype="fp8"), 4096, "moment_dtype 'fp8' does not exist"),
            (DENSE, plan_of(dp_shard=8, moment_dtype="bf16"), 4096, "main_weights fp32 with moment_dtype bf16"),
            (
                DENSE,
                plan_of(dp_shard=8, main_weights="bf16", moment_dtype="bf16"),
                4096,
                "main_weights bf16 need precision bf16, ZeRO, an optimizer on the device and grad_dtype bf16",
            ),
            (DENSE, plan_of(recompute="full", recompute_num_layers=2), 4096, "recompute of 2 layers of a chunk"),
            (DENSE, plan_of(pp=2, schedule="gpipe"), 4096, "schedule 'gpipe' does not exist: use '1f1b'"),
            (DENSE, plan_of(cp=2), 4096, "cp_kind 'ring' does not exist"),
            (DENSE, plan_of(recompute="selective"), 4096, "recompute 'selective' does not exist"),
            (DENSE, plan_of(precision="fp8"), 4096, "precision 'fp8' does not exist"),
            (DENSE, plan_of(pp=2, dp_shard=2, sharding="zero2"), 4096, "zero2 needs pp 1, pp is 2: use zero1"),
            (DENSE, plan_of(pp=2, cp=2, cp_kind="all_to_all"), 4096, "cp 2 needs pp 1"),
            (DENSE, plan_of(cp=8, cp_kind="all_to_all"), 4100, "seq_len 4100 must be divisible by cp 8"),
            (SIX_GROUPS, plan_of(cp=4, cp_kind="all_to_all"), 4096, "num_kv_heads 6 be a multiple or a divisor"),
            (DENSE, plan_of(tp=2, cp=2, cp_kind="all_to_all"), 4096, "cp 2 with tp 2"),
            (DENSE, plan_of(sp=True), 4096, "sp: AutoTP keeps whole sequences"),
            (MOE, plan_of(etp=2, dp_shard=2), 4096, "etp 2: every rank has all experts"),
            (MOE, plan_of(tp=2, pp=2, ep=2, dp_shard=2), 4096, "ep 2 with tp 2 needs pp 1"),
            (
                MOE,
                plan_of(cp=2, cp_kind="all_to_all", ep=2, dp_shard=2, sharding="zero3"),
                4096,
                "zero3 with ep 2 needs tp, cp and dp_replicate 1, they are 1, 2 and 1",
            ),
            (DENSE, plan_of(dp_replicate=2, dp_shard=2, sharding="zero2"), 4096, "zero2 shards over all replicas"),
            (DENSE, plan_of(dp_shard=2, offload="optimizer"), 4096, "offload 'optimizer' needs ZeRO"),
        ),
    ),
}


def own_rules(book: Rulebook) -> tuple[Rule, ...]:
    return tuple(rule for rule in book.rules if rule not in universal.RULES)


@pytest.mark.parametrize("name", BREAKING)
def test_a_plan_that_breaks_a_rule_is_told_that_rule_alone(name: str) -> None:
    book, cases = BREAKING[name]
    for model, plan, seq_len, says in cases:
        faults = broken(book.rules, workload_of(model, plan, seq_len), plan)
        assert len(faults) == 1, (says, faults)
        assert says in faults[0]
        assert "\n" not in faults[0]


@pytest.mark.parametrize("name", BREAKING)
def test_every_rule_is_broken_by_some_plan(name: str) -> None:
    book, cases = BREAKING[name]
    plan = plan_of()
    never = [
        rule.text(workload_of(DENSE, plan), plan)
        for rule in own_rules(book)
        if all(
            rule.holds(workload_of(model, plan, seq_len), PlanBatch.of([plan], model.num_layers))[0]
            for model, plan, seq_len, _ in cases
        )
    ]
    # More chunks than one need a schedule that neither of the two that refuse them has.
    assert all("there is no interleaving" in says for says in never)


@pytest.mark.parametrize("book", [nanotron.BOOK, deepspeed.BOOK])
def test_frameworks_without_interleaving_refuse_more_chunks(book: Rulebook) -> None:
    plan = plan_of(pp=2, vp=2, schedule="interleaved")
    faults = broken(book.rules, workload_of(DENSE, plan), plan)
    assert any("vp 2: there is no interleaving" in fault for fault in faults)


LEGAL: dict[str, tuple[Rulebook, tuple[tuple[ModelSpec, ParallelPlan], ...]]] = {
    "torchtitan": (
        torchtitan.BOOK,
        (
            (DENSE, plan_of(tp=8, sp=True, pp=8, dp_shard=4, sharding="zero3", global_batch=256)),
            (DENSE, plan_of(dp_replicate=2, dp_shard=8, sharding="zero2", recompute="selective")),
            (DENSE, plan_of(cp=4, dp_shard=2, sharding="zero3", precision="fp8")),
            (DENSE, plan_of(pp=4, vp=2, schedule="zb-v", dp_shard=2, sharding="zero3")),
            (DENSE, plan_of(pp=4, vp=2, schedule="dualpipe-v")),
            (MOE, plan_of(tp=2, etp=2, dp_shard=2)),
            (MOE, plan_of(tp=2, ep=8, dp_shard=4, sharding="zero3")),
            (TIED, plan_of(dp_shard=8)),
        ),
    ),
    "pytorch-fsdp": (
        fsdp2.BOOK,
        (
            (DENSE, plan_of(tp=4, dp_shard=8, sharding="zero3", recompute="full", recompute_num_layers=4)),
            (DENSE, plan_of(pp=4, schedule="zb-h1", dp_shard=2)),
            (DENSE, plan_of(pp=3, vp=4, schedule="interleaved", global_batch=6)),
            (DENSE, plan_of(pp=8, schedule="gpipe", global_batch=2)),
        ),
    ),
    "nanotron": (
        nanotron.BOOK,
        (
            (DENSE, split(4, tp=2, sp=True, dp_shard=2, sharding="zero1", global_batch=6)),
            (DENSE, split(8, schedule="gpipe", global_batch=2)),
            (replace(TIED, num_layers=24), plan_of(dp_shard=4, recompute="full")),
        ),
    ),
    "deepspeed": (
        deepspeed.BOOK,
        (
            (DENSE, plan_of(dp_shard=8, sharding="zero3", offload="optimizer", recompute="full")),
            (DENSE, plan_of(dp_shard=8, sharding="zero3", offload="optimizer", offload_percent=57)),
            (DENSE, plan_of(tp=8, pp=12, dp_shard=4, sharding="zero1", precision="fp16")),
            (DENSE, plan_of(cp=16, cp_kind="all_to_all", dp_shard=2, sharding="zero3")),
            (DENSE, plan_of(dp_replicate=2, dp_shard=8, sharding="zero3")),
            (MOE, plan_of(tp=2, ep=4, dp_shard=4, sharding="zero2")),
        ),
    ),
}


@pytest.mark.parametrize("name", LEGAL)
def test_an_ordinary_plan_is_legal(name: str) -> None:
    book, plans = LEGAL[name]
    for model, plan in plans:
        assert broken(book.rules, workload_of(model, plan), plan) == (), plan.describe()


def test_a_batch_holds_no_dualpipe_that_its_micro_batches_do_not_fill() -> None:
    plan = plan_of(pp=4, vp=2, schedule="zb-v", global_batch=7)
    batch = PlanBatch.of([plan], DENSE.num_layers)
    short = replace(batch, schedule=batch.schedule * 0 + Schedule.DUALPIPE_V.code)
    assert legal(universal.RULES, workload_of(DENSE, plan), batch).all()
    assert not legal(universal.RULES, workload_of(DENSE, plan), short).any()


def test_a_schedule_that_is_followed_pass_by_pass_is_refused_where_it_has_too_many() -> None:
    # 3 x 4 stages x 40,960 micro-batches are 491,520 passes, 3 x 4 x 45,056 are 540,672.
    short, long = (plan_of(pp=4, schedule="zb-h1", global_batch=batch) for batch in (40_960, 45_056))
    assert broken(universal.RULES, workload_of(DENSE, short), short) == ()
    assert broken(universal.RULES, workload_of(DENSE, long), long) == (
        "zb-h1 with pp 4, vp 1 and 45056 micro-batches has more than the 524288 passes that are priced: "
        "raise micro_batch, or use 1f1b or interleaved (any framework)",
    )
    assert not broken(universal.RULES, workload_of(DENSE, long), replace(long, schedule=Schedule.ONE_F_ONE_B))


def test_every_rank_of_a_pipeline_has_a_layer() -> None:
    """26 chunks hold 24 layers, the embedding and the head, over two ranks or 13; 25 ranks are too many."""
    for pp, is_lawful in ((2, True), (13, True), (24, True), (25, False), (26, False)):
        plan = plan_of(pp=pp, vp=26 // pp if 26 % pp == 0 else 1, schedule="interleaved" if pp < 24 else "1f1b")
        faults = broken(universal.RULES, workload_of(DENSE, plan), plan)
        assert any("of which every rank has one" in fault for fault in faults) is not is_lawful


def test_a_search_leaves_out_schedules_of_too_many_passes() -> None:
    """A search that would end in an error for one plan of its space."""
    found = autoplan.search(
        "llama3-8b",
        cluster="h100:8x8",
        global_batch=16384,
        seq_len=256,  # torch's stages have buffers for the inputs of all 8,192 micro-batches
        framework="torchtitan",
        fix={"pp": 32, "tp": 1, "micro_batch": 1},
    )
    assert found.plan.schedule in (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED, Schedule.GPIPE)


def test_the_rules_name_their_places() -> None:
    for book in BOOKS.values():
        for rule in own_rules(book):
            is_place = re.search(r"\.(py|md|ya?ml)\b|torchao|github\.com", rule.source)
            assert is_place or rule.source == ANY_FRAMEWORK, rule.source


def test_every_preset_has_rules_or_says_that_they_are_unknown() -> None:
    known = {name: load_framework(name).rules for name in preset_frameworks()}
    assert {known[name] for name in ("torchtitan", "nanotron", "pytorch-fsdp", "deepspeed-zero")} == {
        "torchtitan",
        "nanotron",
        "fsdp2",
        "deepspeed",
    }
    assert book_of(load_framework("nanotron")).split is nanotron.layers_per_stage


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sharding": "zero1"}, "sharding 'zero1' does not exist: use 'none' (in this version)"),
        ({"recompute": "selective"}, "recompute 'selective' does not exist: use 'none' or 'full' (in this version)"),
        (
            {"recompute": "full", "recompute_num_layers": 2},
            "recompute of 2 layers of a chunk is known of other versions",
        ),
        ({"tp": 2, "sp": True}, "sp is known of other versions only: leave it out"),
        ({"cp": 2}, "cp 2 is known of other versions only: leave it out"),
        ({"pp": 2, "layers_per_chunk": (11, 13)}, "24 layers in 2 chunks: unequal chunks are known of other versions"),
        ({"dp_replicate": 4}, None),
        ({"tp": 2, "pp": 4, "recompute": "full"}, None),
    ],
)
def test_a_version_lacks_options_and_words_that_came_later(changes: dict[str, Any], message: str | None) -> None:
    """Megatron-LM of SC'21 has neither a distributed optimizer nor selective recomputation nor unequal stages."""
    plan = plan_of(**changes)
    faults = broken(book_of(load_framework("megatron-lm-2021")).rules, workload_of(DENSE, plan), plan)
    assert len(faults) == (message is not None)
    assert all(message in fault for fault in faults if message)
    now = book_of(load_framework("megatron-core")).rules
    assert all("this version" not in fault for fault in broken(now, workload_of(DENSE, plan), plan))


def test_a_search_of_a_version_stays_inside_it() -> None:
    found = autoplan.search(
        "llama3-8b", cluster="a100-sxm:2x8", global_batch=64, seq_len=2048, framework="megatron-lm-2021"
    )
    limits = " ".join(found.file.certificate.limits)
    assert "sharding none" in limits
    assert "recompute none|full " in f"{limits} "
    assert (
        autoplan.estimate(
            "llama3-8b",
            cluster="a100-sxm:2x8",
            global_batch=64,
            seq_len=2048,
            framework="megatron-lm-2021",
            plan={"tp": 8},
        ).plan.sharding
        == "none"
    )
