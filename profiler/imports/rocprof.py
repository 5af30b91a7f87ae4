"""Output of AMD's rocprofv3 in JSON: the activity of each device in a step, as from traces of torch's profiler.

It is written by `rocprofv3 --kernel-trace --memory-copy-trace --marker-trace --output-format json`.  Times are
nanoseconds; names of kernels and of roctx ranges stand apart, by the numbers of kernels and of calls (as in the tests
of ROCm/rocprofiler-sdk, tests/rocprofv3).
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import msgspec

from autoplan.base.errors import InputError
from autoplan.profiler.imports.kineto import RankTrace, Span, activity_of, decoded, json_head, summed
from autoplan.profiler.imports.nsight import STEP

_GPU = 2  # type of an agent


class _Handle(msgspec.Struct):
    handle: int = 0


class _Call(msgspec.Struct):
    internal: int = 0


class _Agent(msgspec.Struct):
    id: _Handle
    type: int = 0


class _Symbol(msgspec.Struct):
    kernel_id: int
    formatted_kernel_name: str = ""


class _Timed(msgspec.Struct):
    start_timestamp: int
    end_timestamp: int

    def span(self, name: str) -> Span:
        """Return it in seconds, under a name."""
        return Span(1e-9 * self.start_timestamp, 1e-9 * self.end_timestamp, name)


class _Dispatch(msgspec.Struct):
    agent_id: _Handle
    kernel_id: int


class _Kernel(_Timed):
    dispatch_info: _Dispatch


class _Copy(_Timed):
    src_agent_id: _Handle = msgspec.field(default_factory=_Handle)
    dst_agent_id: _Handle = msgspec.field(default_factory=_Handle)


class _Range(_Timed):
    correlation_id: _Call = msgspec.field(default_factory=_Call)


class _Name(msgspec.Struct):
    key: int
    value: str


class _Strings(msgspec.Struct):
    marker_api: list[_Name] = msgspec.field(default_factory=list)


class _Records(msgspec.Struct):
    kernel_dispatch: list[_Kernel] = msgspec.field(default_factory=list)
    memory_copy: list[_Copy] = msgspec.field(default_factory=list)
    marker_api: list[_Range] = msgspec.field(default_factory=list)


class _Process(msgspec.Struct):
    agents: list[_Agent]
    kernel_symbols: list[_Symbol]
    buffer_records: _Records
    strings: _Strings = msgspec.field(default_factory=_Strings)


class _File(msgspec.Struct):
    processes: list[_Process] = msgspec.field(name="rocprofiler-sdk-tool")


def is_output(path: Path) -> bool:
    """Return whether a file begins like JSON of rocprofv3, compressed or not."""
    return b'"rocprofiler-sdk-tool"' in json_head(path)


def read_output(path: Path) -> list[RankTrace]:
    """Return the activity of each device; roctx ranges with names such as "step 7" mark the steps.

    Raises InputError if the file is no output of rocprofv3, or has no kernels.
    """
    file = decoded(path, _File, what="output of rocprofv3")
    ranks = []
    for number, process in enumerate(file.processes):
        spans, marks = _device_spans(process), _marks(process)
        for device, of_device in sorted(spans.items()):
            is_alone = len(file.processes) == len(spans) == 1
            name = str(path) if is_alone else f"{path}, device {device} of process {number}"
            activities = [(span, activity_of(span.name)) for span in of_device]
            ranks.append(summed(name, activities, [(mark, False) for mark in marks], has_devices=True))
    if not ranks:
        raise InputError(f"{path}: no kernels of a device in it: trace with rocprofv3 --kernel-trace")
    return ranks


def _device_spans(process: _Process) -> dict[int, list[Span]]:
    """Return kernels and copies by the place of the device among all of the node."""
    devices = [agent.id.handle for agent in process.agents if agent.type == _GPU]
    place = {handle: at for at, handle in enumerate(devices)}
    names = {symbol.kernel_id: symbol.formatted_kernel_name for symbol in process.kernel_symbols}
    spans: dict[int, list[Span]] = defaultdict(list)
    for kernel in process.buffer_records.kernel_dispatch:
        launch = kernel.dispatch_info
        spans[place.get(launch.agent_id.handle, -1)].append(kernel.span(names.get(launch.kernel_id, "")))
    for copy in process.buffer_records.memory_copy:
        ends = {copy.src_agent_id.handle, copy.dst_agent_id.handle}
        for handle in ends & place.keys():
            spans[place[handle]].append(copy.span("Memcpy"))
    kept = {device: [span for span in of_one if span.end_s > span.start_s] for device, of_one in spans.items()}
    return {device: of_one for device, of_one in kept.items() if of_one}


def _marks(process: _Process) -> list[Span]:
    """Return the ranges that mark steps."""
    names = {name.key: name.value.strip() for name in process.strings.marker_api}
    ranges = process.buffer_records.marker_api
    marks = (marked.span(names.get(marked.correlation_id.internal, "")) for marked in ranges)
    return [mark for mark in marks if STEP.match(mark.name) and mark.end_s > mark.start_s]
