"""Do the units that are timed compute what a layer, its halves and the ends of a model compute?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from autoplan.base.errors import InputError  # noqa: E402
from autoplan.profiler.operations.inputs import MAX_SETS, ChainedRun, InputFactory, StagedRun, in_turns, num_sets  # noqa: E402
from autoplan.profiler.operations.trainer_units import (  # noqa: E402
    UNITS,
    Grids,
    _Layer,
    _plan,
    _staged,
    build,
    implementation,
    meets,
)
from autoplan.spec.operations import TRAINER_UNITS, Operation  # noqa: E402

CPU = torch.device("cpu")
LAYER = (1, 64, 32, 48, 4, 2, 8, 1)
FACTORY = InputFactory(device=CPU, dtype="fp32")


@pytest.fixture(scope="module")
def grids(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grids]:
    """Grids of a job with one rank, this process."""
    place: Path = tmp_path_factory.mktemp("ranks") / "meeting"
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=0, world_size=1)
    yield Grids(1, 1, CPU)
    dist.destroy_process_group()


def flops(operation: Operation, shape: tuple[int, ...], grids: Grids) -> float:
    """Operations of the products that are timed, as torch counts them; of a chain those of a link."""
    unit = build(operation, shape, FACTORY, grids)
    made = unit.prepare() if isinstance(unit, StagedRun) else None
    with FlopCounterMode(display=False) as counter:
        unit.run(made) if isinstance(unit, StagedRun) else unit()
    return float(counter.get_total_flops()) / (unit.num_links if isinstance(unit, ChainedRun) else 1)


def test_a_layer_computes_its_matrices_and_its_halves_those_of_its_backward_pass(grids: Grids) -> None:
    _, seq_len, hidden_size, ffn_size, heads, kv_heads, head_dim, _ = LAYER
    matrices = 2 * seq_len * hidden_size * ((2 * heads + 2 * kv_heads) * head_dim + 3 * ffn_size)
    assert flops("layer", LAYER, grids) == matrices  # torch counts no flash attention of a CPU
    assert flops("layer_backward", LAYER, grids) == 2 * matrices
    assert flops("layer_input_gradient", LAYER, grids) == matrices
    assert flops("layer_weight_gradient", LAYER, grids) == matrices
    assert flops("replicated_layer", (*LAYER, 1, 1), grids) == 3 * matrices


def test_a_layer_of_experts_computes_its_router_and_the_chosen_experts(grids: Grids) -> None:
    num_experts, chosen = 4, 2
    _, seq_len, hidden_size, ffn_size, heads, kv_heads, head_dim, _ = LAYER
    weights = (2 * heads + 2 * kv_heads) * head_dim + 3 * chosen * ffn_size + num_experts
    matrices, shape = 2 * seq_len * hidden_size * weights, (*LAYER, num_experts, chosen)
    assert flops("moe_layer", shape, grids) == matrices
    assert flops("moe_layer_backward", shape, grids) == 2 * matrices
    assert flops("moe_layer_input_gradient", shape, grids) == matrices
    assert flops("moe_layer_weight_gradient", shape, grids) == matrices
    assert flops("replicated_moe_layer", (*shape, 1, 1), grids) == 3 * matrices


def test_ends_are_a_table_and_one_product_with_its_gradients(grids: Grids) -> None:
    assert flops("head", (48, 32, 100, 1), grids) == 3 * 2 * 48 * 32 * 100
    assert flops("embedding", (48, 32, 100, 1), grids) == 0.0


class Counted(TorchDispatchMode):
    """Counts products and attention kernels as they run."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("operation", "products", "cores"),
    # Two for each of seven matrices; all but the last of them, whose output nothing needs, are run again.
    [("layer_backward", 14, 0), ("layer_backward_selective", 14, 1), ("layer_backward_full", 14 + 6, 1)],
)
def test_a_layer_recomputes_what_it_is_asked_to_every_time(
    operation: Operation, products: int, cores: int, grids: Grids
) -> None:
    unit = build(operation, LAYER, FACTORY, grids)
    assert isinstance(unit, StagedRun)
    for _ in range(2):
        made = unit.prepare()
        with Counted() as counted:
            unit.run(made)
        forward = "_scaled_dot_product_flash_attention_for_cpu"
        assert (counted.calls["mm"], counted.calls[forward]) == (products, cores)
        assert counted.calls[forward + "_backward"] == 1


def test_halves_give_the_gradients_of_the_whole(grids: Grids) -> None:
    layer = _Layer(_plan(1, 1), LAYER, FACTORY, grids)
    layer.backward(layer.forward())
    whole = [tensor.grad.clone() for tensor in (layer.x, *layer.module.parameters())]
    layer.module.zero_grad()
    layer.weight_gradients(layer.input_gradient(layer.forward()))
    for tensor, other in zip((layer.x, *layer.module.parameters()), whole, strict=True):
        torch.testing.assert_close(tensor.grad, other)


def test_ranks_that_wait_for_each_other_are_told_by_their_shape() -> None:
    assert not meets("layer", LAYER)
    assert meets("layer", (*LAYER[:-1], 2))
    assert not meets("replicated_layer", (*LAYER, 1, 1))
    assert meets("sharded_layer", (*LAYER, 2, 2))
    assert not meets("pipeline_actions", (4, 2, 2))


def test_the_trainer_computes_in_its_own_types_alone() -> None:
    assert set(UNITS) == TRAINER_UNITS
    assert all(implementation(unit, "bf16") == "trainer" for unit in UNITS)
    assert implementation("layer", "fp16") == implementation("gemm", "bf16") == ""


def test_groups_that_there_is_no_room_for_are_refused(grids: Grids) -> None:
    with pytest.raises(InputError, match="2 devices do not divide the 1 ranks"):
        build("layer", (*LAYER[:-1], 2), FACTORY, grids)
    with pytest.raises(InputError, match="2 devices have 1 of them on a node, got 2"):
        build("sharded_layer", (*LAYER, 2, 2), FACTORY, grids)


def test_a_layer_comes_back_when_all_others_have_run() -> None:
    calls: list[tuple[str, str]] = []
    layers: Any = ["a", "b", "c"]
    unit = _staged(
        layers, lambda layer: calls.append(("before", str(layer))), lambda layer, _: calls.append(("run", str(layer)))
    )
    for _ in range(6):
        unit()
    before = [layer for what, layer in calls if what == "before"]
    runs = [layer for what, layer in calls if what == "run"]
    assert runs == ["b", "c", "a", "b", "c", "a"]
    assert before == ["b", "c", "a", "b", "c", "a", "b", "c"]  # each as often as it runs, and two ahead
    alone = _staged(layers[:1], lambda layer: calls.append(("before", str(layer))), lambda layer, _: None)
    calls.clear()
    alone()
    assert calls == [("before", "a")]


def test_what_takes_turns_is_more_than_twice_a_cache() -> None:
    for touched in (100, 1000, 1999, 2000, 2001, 5000):
        count = num_sets(touched, torch.device("cpu"), cache_bytes=1000)
        assert count == MAX_SETS or count * touched > 2000 >= (count - 1) * touched
    turns = in_turns([lambda: 1, lambda: 2])
    assert [turns(), turns(), turns()] == [1, 2, 1]
