"""Tasks for the timings that the cost of plans looks up, as far as the connected ranks can measure them.

The cost model records the shapes that it looks up (`TimingTable.noting`), and only these are queued.  Groups of devices
that the ranks cannot form are replaced by the nearest possible ones, from which the cost model scales.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from autoplan.profiler.group_layouts import Layout
from autoplan.profiler.protocol import BESIDE, Hello, Task, rules_for
from autoplan.profiler.record import Mode
from autoplan.profiler.tasks import BESIDE_LEAST_BYTES, OVERHEAD_S, RankedTask, TaskKey, reference_s
from autoplan.spec.operations import COLLECTIVES, HOST_COPIES, SHAPES, Operation
from autoplan.spec.timing import batch_index
from autoplan.topology.cluster import DeviceSpec

Lookups = Mapping[tuple[Operation, str], Collection[tuple[int, ...]]]

SIZE_STEP = 4  # ratio of buffer sizes in a series: rates in between are interpolated
SMALLEST_BYTES, LARGEST_BYTES = 2**10, 2**30  # beyond the largest size the rate is constant
REDUCTIONS = ("all_gather", "all_reduce", "reduce_scatter")


def lookup_tasks(
    lookups: Lookups, hello: Hello, modes: Collection[Mode], device: DeviceSpec, measured: Collection[TaskKey]
) -> list[RankedTask]:
    """Return the tasks for looked-up timings that are not measured yet, the longest calls first."""
    tasks: list[RankedTask] = []
    for mode in modes:
        for operation, dtype, shape, suffix in sorted(_measurable(lookups, hello)):
            is_windowed = operation.startswith("attention") and shape[-1] > 0
            kernel = (hello.windowed if is_windowed else hello.kernels).get((operation, dtype))
            if not kernel:
                continue
            task = Task(operation=operation, shape=shape, dtype=dtype, kernel=kernel + suffix, mode=mode)
            if task.key not in measured:
                call_s = reference_s(task, device)
                expected_s = rules_for(hello.device_type, mode).expected_s(call_s) + OVERHEAD_S
                tasks.append(RankedTask(task=task, effect_s=call_s, expected_s=expected_s))
    return sorted(tasks, key=lambda ranked: (-ranked.effect_s, ranked.task.shape[batch_index(ranked.task.operation)]))


def _measurable(lookups: Lookups, hello: Hello) -> set[tuple[Operation, str, tuple[int, ...], str]]:
    """Return (operation, type, shape, suffix of the kernel's name) of the lookups that these ranks can run."""
    measurable: set[tuple[Operation, str, tuple[int, ...], str]] = set()
    groups: dict[tuple[Operation, Layout], set[int]] = defaultdict(set)
    copies: dict[Operation, set[int]] = defaultdict(set)
    for (operation, dtype), shapes in lookups.items():
        for shape in shapes:
            if operation in COLLECTIVES:
                if layout := nearest_layout(shape, hello.num_domains, hello.ranks_per_domain):
                    groups[operation, layout].add(shape[3])
            elif operation in HOST_COPIES:
                copies[operation].add(shape[0])
            elif dtype in hello.dtypes and _is_shape(operation, shape):
                measurable.add((operation, dtype, shape, ""))
    wide = next((dtype for dtype in hello.dtypes if dtype in ("bf16", "fp16", "fp32")), None)
    if wide is None:
        return measurable
    for operation, sizes in copies.items():
        measurable |= {(operation, wide, (buffer_bytes,), "") for buffer_bytes in _buffers(sizes)}
    for (operation, layout), sizes in groups.items():
        for buffer_bytes in _buffers(sizes):
            measurable.add((operation, wide, layout.shape(buffer_bytes), ""))
            if operation in REDUCTIONS and buffer_bytes >= BESIDE_LEAST_BYTES:
                measurable.add((operation, wide, layout.shape(buffer_bytes), BESIDE))
    return measurable


def _is_shape(operation: Operation, shape: tuple[int, ...]) -> bool:
    """Return whether there is anything to run: a lookup may have no tokens."""
    return all(size > 0 or name == "window" for name, size in zip(SHAPES[operation], shape, strict=True))


def nearest_layout(shape: tuple[int, ...], num_domains: int, ranks_per_domain: int) -> Layout | None:
    """Return the layout nearest to a collective's that ranks in so many domains can form; None if there is none.

    All siblings of a group work at the same time, as in training.  A group across domains is measured over all domains,
    with the same number of members in each.
    """
    members, inside, _, _ = shape
    per_node = _largest_divisor(ranks_per_domain, inside)
    domains = 1 if members == inside else _largest_divisor(num_domains, max(round(members / inside), 2))
    if per_node * domains < 2 or (members != inside and domains < 2):
        return None
    return Layout(num_devices=per_node * domains, devices_per_node=per_node, num_groups=ranks_per_domain // per_node)


def _largest_divisor(number: int, at_most: int) -> int:
    return max(size for size in range(1, min(number, at_most) + 1) if number % size == 0)


def _buffers(sizes: Collection[int]) -> Iterator[int]:
    """Yield buffer sizes that cover all `sizes` by interpolation, or by the constant rate at the ends."""
    smallest, largest = (min(max(size, SMALLEST_BYTES), LARGEST_BYTES) for size in (min(sizes), max(sizes)))
    first, last = math.floor(math.log(smallest, SIZE_STEP)), math.ceil(math.log(largest, SIZE_STEP))
    yield from (SIZE_STEP**power for power in range(first, last + 1))
