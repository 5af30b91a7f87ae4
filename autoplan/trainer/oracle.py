"""Memory oracle: bytes of a rank's tensors under a plan that needs more devices than are available.

The trainer itself runs as one rank of the plan, on tensors without data and in a process group without other members
(FakeTensorMode and torch's "fake" backend, `closed-loop` 7).  Bytes are counted by the `StorageTracker`, as in real
runs: torch's MemTracker refuses a module that runs several times in a step, as micro-batches do.

Torch caches meshes and groups, so a process can only serve one rank of one plan (`verify`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its customary name
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining._utils import (
    InferenceMode,
    _StageBackwardMeta,
    _StageForwardMeta,
    extract_tensor_metas,
)
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from autoplan.trainer import parallel, step
from autoplan.trainer.question import Moment, Question
from autoplan.trainer.rank import error_cause
from autoplan.trainer.step import Training
from autoplan.trainer.tensor_memory import StorageTracker

# Function that negotiates shape inference with neighbouring stages: its name in torch 2.15, then in 2.13.
_VOTES = ("_initialize_pipeline_distributed_state", "_warmup_p2p")


def serve(line: Connection, questions: list[Question]) -> None:
    """Send the peaks of a rank by moment, for plans that differ only in their layers; runs once per process."""
    try:
        torch.set_num_threads(1)
        first = questions[0]
        plan = first.plan
        # The first rank of its stage: no other one needs more memory.
        rank = first.stage * plan.tp * (plan.dp if plan.rank_order == "tp-cp-ep-dp-pp" else 1)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.num_devices)
        with _grounded(first):
            line.send([_peaks(question) for question in questions])
    except Exception as error:
        line.send(error_cause(error))


def _peaks(question: Question) -> dict[Moment, int]:
    """Return the peak bytes of the rank's tensors at every moment of the second step; the first creates the states."""
    with FakeTensorMode(allow_non_fake_inputs=True), StorageTracker() as tracker:
        training = Training(
            question.model,
            question.plan,
            seq_len=question.seq_len,
            device=torch.device("cpu"),
            dtype=question.plan.precision,
        )
        tokens = torch.zeros((question.plan.global_batch, question.seq_len + 1), dtype=torch.int64)
        watch = _Watch(tracker)
        for at, part in enumerate(training.parts):
            watch.follow(at, list(part.layers.values()))
        for _ in range(2):
            watch.begin()
            training.optimizer.zero_grad()
            training.backpropagate(tokens)
            watch.enter((0, "update"))
            training.optimizer.step()
        return watch.end()


class _Watch:
    """Peaks by moment; hooks around the layers distinguish the first, the last, and the layers between."""

    def __init__(self, tracker: StorageTracker) -> None:
        self._tracker = tracker
        self._moment: Moment = (0, "start")
        self._peaks: dict[Moment, int] = {}

    def follow(self, chunk: int, layers: list[nn.Module]) -> None:
        """Register hooks on the layers of a chunk."""
        for at, layer in enumerate(layers):
            where = "first" if at == 0 else "last" if at == len(layers) - 1 else "middle"
            layer.register_forward_pre_hook(self._hook((chunk, f"{where} forward")))
            layer.register_forward_hook(self._hook((chunk, f"{where} backward"), of_gradient=True))

    def _hook(self, moment: Moment, *, of_gradient: bool = False) -> Callable[..., None]:
        def enter(*_: object) -> None:
            self.enter(moment)

        def watch(module: object, inputs: object, output: Any) -> None:
            if output.requires_grad:
                output.register_hook(enter)

        return watch if of_gradient else enter

    def begin(self) -> None:
        """Begin a step and reset the peaks."""
        self._peaks, self._moment = {}, (0, "start")
        self._tracker.forget_peak()

    def enter(self, moment: Moment) -> None:
        """Attribute peaks to `moment` from now on."""
        self._peaks[self._moment] = max(self._peaks.get(self._moment, 0), self._tracker.peak_bytes)
        self._tracker.forget_peak()
        self._moment = moment

    def end(self) -> dict[Moment, int]:
        """Return the peaks since `begin`."""
        self.enter((0, "start"))
        return self._peaks


class _FusedNorm(torch.autograd.Function):
    """Saves the same bytes as aten::_fused_rms_norm, which the CPU lacks: input, weight and fp32 reciprocals."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32), weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, _, weight = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _fused_norm(x: Tensor, shape: object, weight: Tensor, eps: float) -> Any:
    return _FusedNorm.apply(x, weight)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _grounded(question: Question) -> Iterator[None]:
    """Exclude what is not part of the training from the modes, and provide neighbours' shapes to pipeline stages.

    Meshes contain real numbers, not fakes.  DTensor infers shapes by running operations on full-size tensors, which no
    device ever holds.
    """

    def real(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            with _disable_current_modes():
                return function(*args, **options)

        return run

    plan, model = question.plan, question.model
    tokens = question.seq_len // (plan.tp if plan.sp else 1)
    shape = (plan.micro_batch, tokens, model.hidden_size)

    class Stage(PipelineStage):
        def _send_meta(self, meta: Any, dst_stage: int) -> None:
            pass

        def _recv_meta(self, src_stage: int) -> Any:
            hidden = torch.empty(shape, dtype=parallel.DTYPES[plan.precision], device="meta")
            metas = extract_tensor_metas((hidden.requires_grad_(src_stage < self.stage_index),)) or ()
            return _StageForwardMeta(metas) if src_stage < self.stage_index else _StageBackwardMeta(metas)

    def vote(schedule: object, stages: list[Any], *_: object) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.DYNAMIC

    names = [
        name for name, value in vars(DeviceMesh).items() if inspect.isfunction(value) and not name.startswith("__")
    ]
    with contextlib.ExitStack() as stack:
        for name in ("__init__", "__getitem__", *names):
            stack.enter_context(_replaced(DeviceMesh, name, real(getattr(DeviceMesh, name))))
        shapes = "_propagate_tensor_meta_non_cached"
        stack.enter_context(_replaced(ShardingPropagator, shapes, real(getattr(ShardingPropagator, shapes))))
        if question.fused_norm:
            stack.enter_context(_replaced(F, "rms_norm", _fused_norm))
        stack.enter_context(_replaced(step, "make_grid", real(parallel.make_grid)))
        stack.enter_context(_replaced(parallel, "PipelineStage", Stage))
        schedule = schedules._PipelineSchedule
        name = next(name for name in _VOTES if hasattr(schedule, name))
        stack.enter_context(_replaced(schedule, name, vote))
        yield


@contextlib.contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
