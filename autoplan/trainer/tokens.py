"""Training data: the bytes of a small text, or random numbers.

The text is in the public domain: parts of the Declaration of Independence (1776), the Gettysburg Address (1863), and
Shakespeare's Sonnet 18 (1609).
"""

from __future__ import annotations

from importlib.resources import files

import torch
from torch import Tensor

from autoplan.trainer.task import Task


def sequences(task: Task, step: int) -> Tensor:
    """Return the tokens of one step, (global_batch, seq_len + 1), which are the same on every rank."""
    generator = torch.Generator().manual_seed(task.seed * 1_000_003 + step)
    shape = (task.global_batch, task.seq_len + 1)
    if task.data == "synthetic":
        return torch.randint(task.model.vocab_size, shape, generator=generator)
    text = torch.frombuffer(bytearray(files("autoplan.trainer").joinpath("text.txt").read_bytes()), dtype=torch.uint8)
    starts = torch.randint(len(text), (shape[0], 1), generator=generator)
    return text[(starts + torch.arange(shape[1])) % len(text)].long()
