"""Is what `profile --for` queues what prices look up, and all of it, on whatever ranks there are?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoplan.api.problem import make_problem
from autoplan.cost.estimate import estimate
from autoplan.cost.lookups import looked_up_shapes
from autoplan.profiler.group_layouts import Layout, groups_of
from autoplan.profiler.lookup_tasks import lookup_tasks, nearest_layout
from autoplan.profiler.protocol import BESIDE, Hello
from autoplan.profiler.record import Fingerprint
from autoplan.profiler.tasks import reference_s
from autoplan.search.measurement_value import DATASHEET_SPREAD, family_of, spread_of_price
from autoplan.spec.enums import Sharding
from autoplan.spec.measurement import Measurement
from autoplan.spec.operations import COLLECTIVES, HOST_COPIES, JOINED_KERNELS, SHAPES, TRAINER_UNITS
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.timing import TimingTable

PROBLEM = make_problem("llama3-70b", cluster="h100-sxm:16x8", seq_len=8192)
PLANS = [
    ParallelPlan(global_batch=512, micro_batch=1, tp=4, sp=True, pp=16, dp_shard=2, sharding=Sharding.ZERO1),
    ParallelPlan(global_batch=512, micro_batch=1, tp=2, sp=True, cp=2, pp=4, dp_shard=8, sharding=Sharding.ZERO1),
]
BATCH = PlanBatch.of(PLANS, PROBLEM.model.num_layers)


def hello(num_nodes: int, per_node: int = 8, devices_per_domain: int = 8, dtypes: tuple[str, ...] = ("bf16",)) -> Hello:
    known = [name for name in SHAPES if name not in (*JOINED_KERNELS, *TRAINER_UNITS)]
    return Hello(
        fingerprint=Fingerprint(device="h100-sxm", memory_bytes=80 * 2**30, torch="2.13.0"),
        device_type="cuda",
        hosts=tuple(f"n{at // per_node}" for at in range(num_nodes * per_node)),
        dtypes=dtypes,
        kernels={(name, dtype): "nccl" if name in COLLECTIVES else "way" for name in known for dtype in dtypes},
        devices_per_domain=devices_per_domain,
    )


def layout(num_devices: int, devices_per_node: int, num_groups: int) -> Layout:
    return Layout(num_devices=num_devices, devices_per_node=devices_per_node, num_groups=num_groups)


@pytest.mark.parametrize(
    ("shape", "domains", "ranks", "expected"),
    [
        ((8, 8, 1, 1), 16, 8, layout(8, 8, 1)),
        ((4, 4, 2, 1), 16, 8, layout(4, 4, 2)),
        ((2, 1, 8, 1), 16, 8, layout(2, 1, 8)),  # a message to the next node, from every device at once
        ((32, 2, 4, 1), 16, 8, layout(32, 2, 4)),
        ((32, 2, 4, 1), 4, 8, layout(8, 2, 4)),  # as many of a node, over as many nodes as there are
        ((32, 2, 4, 1), 1, 8, None),
        ((72, 72, 1, 1), 1, 72, layout(72, 72, 1)),
        ((24, 24, 3, 1), 1, 8, layout(8, 8, 1)),
        ((24, 12, 6, 1), 2, 72, layout(24, 12, 6)),
        ((12, 8, 1, 1), 2, 8, layout(16, 8, 1)),  # uneven: the next that is not
        ((2, 2, 4, 1), 1, 1, None),
    ],
)
def test_the_nearest_group_that_ranks_can_form(
    shape: tuple[int, ...], domains: int, ranks: int, expected: Layout | None
) -> None:
    found = nearest_layout(shape, domains, ranks)
    assert found == expected
    if found:
        assert len(groups_of(found, domains, ranks)) >= found.num_groups


def test_all_that_a_price_looks_up_is_queued_and_served_with_nothing_left_to_the_reference() -> None:
    lookups = looked_up_shapes(PROBLEM, BATCH)
    assert (2, 1, 8, 8192 * 8192 * 2 // 4) in lookups["send_recv", "bf16"]  # the pipeline's messages between nodes
    assert {shape[:3] for shape in lookups["reduce_scatter", "bf16"]} >= {(4, 4, 2), (2, 2, 4), (16, 4, 2)}
    device = PROBLEM.cluster.device
    for here in (hello(16), hello(4)):
        tasks = [ranked.task for ranked in lookup_tasks(lookups, here, ("sustained",), device, ())]
        times = [
            Measurement(
                operation=task.operation, shape=task.shape, dtype=task.dtype, device=device.name,
                seconds=1.1 * reference_s(task, device),
            )
            for task in tasks if not task.kernel.endswith(BESIDE)
        ]  # fmt: skip
        timed = replace(PROBLEM, timings=TimingTable.of(times))
        noted = timed.timings.times
        for (operation, dtype), shapes in lookups.items():
            if operation in COLLECTIVES and dtype == "bf16":
                kinds = {shape[:3] for shape in noted[operation, dtype].exact}
                assert {(shape[0] == shape[1]) for shape in shapes} == {kind[0] == kind[1] for kind in kinds}, operation
            elif operation in {measured.operation for measured in times} and dtype == "bf16":
                assert {shape for shape in shapes if min(shape) > 0} <= set(noted[operation, dtype].exact)
        assert (estimate(timed, BATCH).step_s > 0).all()
        # Nothing is queued that no price asks for.
        for task in tasks:
            if task.operation not in COLLECTIVES:
                assert task.shape in lookups[task.operation, task.dtype]
            else:
                assert any((task.operation, dtype) in lookups for dtype in ("bf16", "fp16", "fp32"))
        known = [task.key for task in tasks]
        assert lookup_tasks(lookups, here, ("sustained",), device, known) == []


def test_narrow_products_are_queued_in_the_type_in_which_they_are_looked_up() -> None:
    problem = make_problem("llama3-8b", cluster="b200:1x8", seq_len=8192, precision="mxfp8")
    plan = replace(PLANS[0], global_batch=64, tp=1, sp=False, pp=1, dp_shard=8, precision="mxfp8")  # type: ignore[arg-type]
    lookups = looked_up_shapes(problem, PlanBatch.of([plan], problem.model.num_layers))
    tasks = lookup_tasks(lookups, hello(1, dtypes=("mxfp8", "bf16")), ("sustained",), problem.cluster.device, ())
    narrow = {ranked.task.shape for ranked in tasks if ranked.task.dtype == "mxfp8"}
    assert narrow == {shape for name in ("gemm", "dgrad", "wgrad") for shape in lookups[name, "mxfp8"]}  # type: ignore[index]


def test_copies_to_the_host_are_queued_for_plans_that_offload_and_price_them() -> None:
    problem = make_problem("llama3-8b", cluster="h100-sxm:1x8", framework="megatron-lm", seq_len=8192)
    plan = ParallelPlan(global_batch=64, tp=2, sp=True, dp_shard=4, sharding=Sharding.ZERO1)
    device, here = problem.cluster.device, hello(1)
    queued = {}
    for offload in ("none", "optimizer"):
        batch = PlanBatch.of([replace(plan, offload=offload)], problem.model.num_layers)
        tasks = lookup_tasks(looked_up_shapes(problem, batch), here, ("sustained",), device, ())
        queued[offload] = [ranked.task for ranked in tasks if ranked.task.operation in HOST_COPIES]
    assert not queued["none"]
    assert {task.operation for task in queued["optimizer"]} == {*HOST_COPIES}

    def step_s(growth: float) -> float:
        times = [
            Measurement(
                operation=task.operation, shape=task.shape, dtype=task.dtype, device=device.name,
                seconds=growth * task.shape[0] / device.host_link_bytes_per_s,
            )
            for task in queued["optimizer"]
        ]  # fmt: skip
        return float(estimate(replace(problem, timings=TimingTable.of(times)), batch).step_s[0])

    plain_s = float(estimate(problem, batch).step_s[0])
    assert step_s(1.0) == pytest.approx(plain_s, rel=1e-3)
    copied_s = (step_s(3.0) - step_s(2.0)) / plain_s
    assert step_s(2.0) / plain_s - 1 == pytest.approx(copied_s, rel=1e-2)
    assert copied_s > 0.01


def test_measured_copies_say_nothing_of_the_kernels_of_a_device() -> None:
    copies = Measurement(operation="copy_to_host", shape=(2**20,), dtype="bf16", device="h100-sxm", seconds=1e-4)
    assert not TimingTable.of([copies]).has_kernels
    assert family_of("copy_to_host") == "copies to and from hosts"
    assert spread_of_price(PROBLEM, "copy_to_host", "bf16", (2**20,)) == (DATASHEET_SPREAD, "datasheet")
