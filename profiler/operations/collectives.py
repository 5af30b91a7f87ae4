"""Collectives that can be run and timed over groups of any layout."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from autoplan.base.errors import InputError
from autoplan.profiler.group_layouts import Layout, groups_of
from autoplan.profiler.operations.inputs import BesideRun, ChainedRun, InputFactory, Run
from autoplan.spec.operations import COLLECTIVES, Operation

_REPEATS = 5
_GEMM_SIZE = {"cpu": 256, "cuda": 4096}  # of a product long enough to launch and short enough to fill gaps


class Groups:
    """The process groups of this job by their ranks, made once each: libraries keep buffers for every one."""

    rank: int

    def __init__(self, rank: int, num_nodes: int, devices_per_node: int) -> None:
        self.rank, self._num_nodes, self._devices_per_node = rank, num_nodes, devices_per_node
        self._made: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def of_neighbours(self, num_devices: int, on_node: int) -> dist.ProcessGroup:
        """Return this rank's group of so many, `on_node` of them on each of its nodes.  All ranks call it."""
        member = self.of_shape((num_devices, on_node, self._devices_per_node // on_node, 0))
        assert member is not None
        return member[0]

    def of_shape(self, shape: tuple[int, ...]) -> tuple[dist.ProcessGroup, list[int]] | None:
        """Return (this rank's group of `shape`, its ranks); None for a rank that stands by.  All ranks call it."""
        num_devices, on_node, num_groups, _ = shape
        layout = Layout(num_devices=num_devices, devices_per_node=on_node, num_groups=num_groups)
        own_group = None
        for ranks in groups_of(layout, self._num_nodes, self._devices_per_node):
            if tuple(ranks) not in self._made:  # every rank makes every group, in the same order
                self._made[tuple(ranks)] = dist.new_group(ranks)
            if self.rank in ranks:
                own_group = (self._made[tuple(ranks)], ranks)
        return own_group


def build(operation: Operation, shape: tuple[int, ...], factory: InputFactory, groups: Groups) -> Run | None:
    """A call that runs the collective once and leaves it queued or done; None where this rank stands by."""
    member = groups.of_shape(shape)
    if member is None:
        return None
    start = _starter(operation, shape, factory, *member)
    return lambda: start().wait()


def build_pair(partners: tuple[int, ...], buffer_bytes: int, factory: InputFactory) -> ChainedRun | None:
    """A call that sends a message to this rank's partner and one back; None where it has none.  All ranks call it.

    Messages in batches go over the one communicator of all ranks: one for every pair would fill the memory of devices.
    """
    dist.all_reduce(factory.zeros(1))  # by which libraries make that communicator
    rank = dist.get_rank()
    partner = partners[rank]
    if partner == rank:
        return None
    message = factory.zeros(max(buffer_bytes // factory.torch_dtype.itemsize, 1))
    forth, back = (
        dist.P2POp(dist.isend if sends else dist.irecv, message, partner) for sends in (rank < partner, rank > partner)
    )

    def run() -> None:
        for message_once in (forth, back):
            for work in dist.batch_isend_irecv([message_once]):
                work.wait()

    return ChainedRun(run=run, num_links=2)


def build_beside_gemm(
    operation: Operation,
    shape: tuple[int, ...],
    factory: InputFactory,
    groups: Groups,
    decide: Callable[[float], float],
) -> BesideRun | None:
    """A call that starts the collective, runs products that take about as long as it alone, and waits for both.

    What it takes beyond the longer of the two is what overlapping costs (`modelling` D6).  All ranks call it; `decide`
    hands them what rank 0 measured.
    """
    member = groups.of_shape(shape)
    size = _GEMM_SIZE[factory.device.type]
    inputs, weight, out = factory.normal(size, size), factory.normal(size, size), factory.zeros(size, size)

    def product() -> object:
        return torch.mm(inputs, weight, out=out)

    start = _starter(operation, shape, factory, *member) if member else None
    alone = decide(_once_s(factory.device, (lambda: start().wait()) if start else None))
    num_products = max(round(alone / decide(_once_s(factory.device, product))), 1)

    def products() -> None:
        for _ in range(num_products):
            product()

    products_s = decide(_once_s(factory.device, products))
    if start is None:
        return None

    def run() -> None:
        work = start()
        products()
        work.wait()

    return BesideRun(run=run, products_s=products_s)


def _once_s(device: torch.device, run: Run | None) -> float:
    """Roughly how long `run` takes, in seconds: the least of a few; all ranks make the same number of calls."""
    least = math.inf
    for _ in range(_REPEATS if run else 0):
        assert run is not None
        began = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.cuda.synchronize(device)
        least = min(least, time.perf_counter() - began)
    return least


def _starter(
    operation: Operation, shape: tuple[int, ...], factory: InputFactory, group: dist.ProcessGroup, ranks: list[int]
) -> Callable[[], dist.Work]:
    """A call that starts the collective and returns what can be waited for."""
    num_devices, *_, buffer_bytes = shape
    rank = dist.get_rank()
    # Repeated sums overflow to infinities, which are added as fast.
    # The whole buffer, cut into equal parts for the ranks: at least a number each.
    part = max(buffer_bytes // factory.torch_dtype.itemsize // num_devices, 1)
    full, piece = factory.normal(part * num_devices), factory.normal(part)
    if operation == "all_reduce":
        return lambda: dist.all_reduce(full, group=group, async_op=True)
    if operation == "all_gather":
        gather = _newest("all_gather_single", "all_gather_into_tensor")
        return lambda: gather(full, piece, group=group, async_op=True)
    if operation == "reduce_scatter":
        scatter = _newest("reduce_scatter_single", "reduce_scatter_tensor")
        return lambda: scatter(piece, full, group=group, async_op=True)
    if operation == "all_to_all":
        received = torch.empty_like(full)
        return lambda: dist.all_to_all_single(received, full, group=group, async_op=True)
    if operation == "broadcast":
        return lambda: dist.broadcast(full, ranks[0], group=group, async_op=True)
    if operation == "send_recv":
        if num_devices != 2:
            raise InputError(f"send_recv is between 2 devices, got {num_devices}")
        if rank == ranks[0]:
            return lambda: _posted(dist.isend(full, ranks[1], group=group))
        return lambda: _posted(dist.irecv(full, ranks[0], group=group))
    raise InputError(f"{operation} is no collective: known are {', '.join(sorted(COLLECTIVES))}")


def _newest(*names: str) -> Callable[..., dist.Work]:
    """Return torch.distributed's function under the first of its names that this version has: 2.13 renamed some."""
    collective: Callable[..., dist.Work] = next(getattr(dist, name) for name in names if hasattr(dist, name))
    return collective


def _posted(work: dist.Work | None) -> dist.Work:
    assert work is not None  # only for ranks outside the group
    return work
