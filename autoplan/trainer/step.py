"""Training on one rank: the steps of a plan, their times, and the loss of the whole batch."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its customary name
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan
from autoplan.trainer.device import between, meet, moment
from autoplan.trainer.parallel import ALONE, Grid, build, make_grid, passes
from autoplan.trainer.transformer import Transformer, plain_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Times of one step on this rank, in seconds."""

    step_s: float
    passes_s: float  # forward and backward, including waits
    optimizer_s: float
    microbatch_s: float | None = None  # mean of all but the last; None for one, or with stages


class Training:
    """Part of a training run on one rank.

    Weights are fp32; matrix products use `dtype`.  `optimizer` is "adam", or "sgd" for comparisons: Adam hides
    gradients that are wrong by a factor (`closed-loop` 1, trap 2).  With `is_alone` the plan has one rank, which
    does not synchronise with others.  `micro_batches` are (sequences, number) of each replica's if they differ.
    """

    plan: ParallelPlan
    device: torch.device

    def __init__(
        self,
        model: ModelSpec,
        plan: ParallelPlan,
        *,
        seq_len: int,
        device: torch.device,
        dtype: str,
        optimizer: str = "adam",
        lr: float = 1e-4,
        seed: int = 0,
        is_alone: bool = False,
        micro_batches: tuple[tuple[int, int], ...] = (),
    ) -> None:
        self.plan, self.device, self._is_alone = plan, device, is_alone
        self.grid: Grid = ALONE if is_alone else make_grid(plan, device)
        self.parts: list[Transformer] = build(
            model, plan, self.grid, seq_len=seq_len, dtype=dtype, device=device, seed=seed
        )
        pairs = micro_batches or ((plan.micro_batch, plan.num_microbatches),) * plan.dp
        ends = [0, *accumulate(size * number for size, number in pairs)]
        self._rows = slice(*ends[self.grid.dp_rank :][:2])
        self._size, self._number = pairs[self.grid.dp_rank]
        self._last = moment(device)  # when the last micro-batch of a step began
        self._run = passes(self.parts, plan, self.grid, device, loss_of, micro_batches, self._mark)
        weights = [weight for part in self.parts for weight in part.parameters()]
        if optimizer == "adam":
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(weights, lr=lr, fused=True)
        else:
            self.optimizer = torch.optim.SGD(weights, lr=lr)

    def backpropagate(self, tokens: Tensor) -> list[Tensor]:
        """Run both passes on all sequences of a step, (global_batch, seq_len + 1); return losses on head ranks."""
        sequences = tokens[self._rows].to(self.device)
        inputs, targets = sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()
        with loss_parallel() if self.grid.tp is not None else contextlib.nullcontext():
            return self._run(inputs, targets)

    def step(self, tokens: Tensor) -> tuple[Times, float]:
        """Train on the sequences of a step and return (times, loss)."""
        self.optimizer.zero_grad()
        self._wait()
        began, first = time.perf_counter(), moment(self.device)
        losses = self.backpropagate(tokens)
        self._synchronise()
        middle = time.perf_counter()
        self.optimizer.step()
        self._synchronise()
        end = time.perf_counter()
        has_several = self.grid.pp is None and self._number > 1
        microbatch_s = between(first, self._last) / (self._number - 1) if has_several else None
        times = Times(step_s=end - began, passes_s=middle - began, optimizer_s=end - middle, microbatch_s=microbatch_s)
        return times, self._mean(losses)

    def _mark(self) -> None:
        self._last = moment(self.device)

    def _mean(self, losses: list[Tensor]) -> float:
        """Return the mean over the sequences of all replicas, on every rank."""
        summed = torch.zeros(2, dtype=torch.float64, device=self.device)
        for loss in losses:
            value = (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach()
            summed += self._size * torch.tensor([float(value), 1.0], dtype=torch.float64, device=self.device)
        if not self._is_alone:
            dist.all_reduce(summed)
        return float(summed[0] / summed[1])

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _wait(self) -> None:
        self._synchronise()
        if not self._is_alone:
            meet(self.device)

    def full_weights(self) -> dict[str, Tensor]:
        """Return the unsharded weights of this rank's chunks by name; a collective call of all ranks."""
        return {name: _gathered(weight) for part in self.parts for name, weight in _named_parameters(part)}

    def full_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the last backward passes, unsharded as in `full_weights`."""
        gradients = {}
        for part in self.parts:
            for name, weight in _named_parameters(part):
                assert weight.grad is not None, name
                gradients[name] = _gathered(weight.grad)
        return gradients


def _named_parameters(part: torch.nn.Module) -> list[tuple[str, Tensor]]:
    return [(plain_name(name), weight) for name, weight in part.named_parameters()]


def _gathered(tensor: Tensor) -> Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().float().cpu().clone()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss over tokens, in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
