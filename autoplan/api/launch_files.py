"""Launch files: what a script or a configuration that starts training today says."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from autoplan.api.problem import load_model
from autoplan.api.results import Result, Table
from autoplan.base.errors import InputError
from autoplan.base.units import check_count
from autoplan.frameworks.common.launch import Given, Launch
from autoplan.frameworks.launch_files import read_launch
from autoplan.spec.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadResult(Result):
    """A launch file as it was understood: `launch` has its target, framework, model, training, plan and options."""

    path: Path
    launch: Launch

    @property
    def headline(self) -> str:
        """The file, its target and the framework that it is priced as."""
        return f"{self.path}: a file of {self.launch.target}, priced as {self.launch.framework}"

    def table(self) -> Table:
        """Return the options that were not understood, and whether they may cost time or memory."""
        columns = ("option", "value", "why", "matters")
        return Table(columns=columns, rows=tuple((u.option, u.value, u.why, u.matters) for u in self.launch.unread))

    def to_json(self) -> str:
        """Return what was read as JSON."""
        return msgspec.json.format(msgspec.json.encode(self.launch), indent=2).decode()


def read(
    path: str | Path,
    *,
    model: str | Path | ModelSpec | None = None,
    devices: int | None = None,
    devices_per_node: int | None = None,
    seq_len: int | None = None,
    variables: Iterable[str] | Mapping[str, str] = (),
    target: str | None = None,
) -> ReadResult:
    """Read a script or configuration that starts training, of any target of export; nothing in it is run.

    `model`, `devices` (all together), `devices_per_node` and `seq_len` (tokens) win over what the file says;
    `variables` are those of its shell ({"NAME": "VALUE"}); `target` says what the file is where that is not clear.

    Raises InputError where the file cannot be read, or does not say enough.
    """
    given = make_given(model, devices=devices, devices_per_node=devices_per_node, seq_len=seq_len, variables=variables)
    return ReadResult(path=Path(path), launch=read_launch(Path(path), given, target))


def make_given(
    model: str | Path | ModelSpec | None = None,
    *,
    devices: int | None = None,
    devices_per_node: int | None = None,
    seq_len: int | None = None,
    variables: Iterable[str] | Mapping[str, str] = (),
) -> Given:
    """Return what is said beside a launch file."""
    for flag, value in (("--devices", devices), ("--devices-per-node", devices_per_node), ("--seq-len", seq_len)):
        if value is not None:
            check_count(flag, value, most=10**8)
    texts = [f"{name}={value}" for name, value in variables.items()] if isinstance(variables, Mapping) else variables
    pairs = []
    for text in texts:
        name, sign, value_of = text.partition("=")
        if not sign or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise InputError(f"--set {text[:60]!r}: write NAME=VALUE with the name of a variable of the shell")
        pairs.append((name, value_of))
    return Given(
        model=load_model(model) if model is not None else None,
        num_devices=devices,
        devices_per_node=devices_per_node,
        seq_len=seq_len,
        variables=tuple(pairs),
    )
