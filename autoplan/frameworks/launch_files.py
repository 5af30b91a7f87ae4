"""Launch files, recognised by their content and read by the reader of their target."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from autoplan.base.errors import InputError
from autoplan.base.files import is_file, read_text
from autoplan.frameworks import plan_file, registry
from autoplan.frameworks.common.checks import checked
from autoplan.frameworks.common.launch import Launch, LaunchContext, Reader
from autoplan.frameworks.common.options import NOT_KNOWN
from autoplan.frameworks.common.shell import SUFFIXES, read_script
from autoplan.frameworks.common.started import MAX_DEPTH, MAX_SCRIPTS, Started, started_scripts
from autoplan.topology.cluster import ClusterSpec

MAX_BYTES = 2**20  # a launch file is written by hand
_LAUNCHER = re.compile(r"(^|/)(torchrun|deepspeed|accelerate|accelerate-launch|mpirun|srun)$|torch\.distributed\.\w+$")
_CONFIG = re.compile(r"^(--?[\w.-]+=)?[^-=][^=]*\.(ya?ml|toml|json)$")
_PAGES = (".md", ".rst", ".txt", ".ipynb")  # may quote launch files but are none

READERS = tuple(sorted((*registry.READERS.values(), plan_file.READER), key=lambda reader: reader.target))


class UnknownFileError(InputError):
    """A file that no reader knows."""


def read_launch(path: Path, context: LaunchContext, target: str | None = None, *, depth: int = 0) -> Launch:
    """Read the launch of the file as one of `target`, or of the only target that recognises the file.

    Of a script that starts or submits others in its folder, the first of them that is a launch file is read, with the
    variables that it gets.
    """
    text = read_text(path, most_bytes=MAX_BYTES)
    context = replace(context, folder=path.parent)
    try:
        return _read(path, text, context, target)
    except InputError as error:
        scripts = _started(path, text, context) if depth < MAX_DEPTH else []
        failures: list[InputError] = []
        # Each level tries half as many, so that scripts that start one another do not multiply.
        for started in scripts[: max(MAX_SCRIPTS >> depth, 1)]:
            try:
                launch = read_launch(
                    started.path, replace(context, variables=started.variables), target, depth=depth + 1
                )
            except UnknownFileError:
                continue  # which prepares something, and starts no training
            except InputError as failure:
                failures.append(failure)
                continue
            return replace(launch, unread=(*started.unread, *launch.unread))
        raise failures[0] if failures else error from None


def _started(path: Path, text: str, context: LaunchContext) -> list[Started]:
    """Return the scripts that one starts; none if it cannot be followed."""
    try:
        return started_scripts(path, text, context) if path.suffix in SUFFIXES else []
    except InputError:
        return []


def _read(path: Path, text: str, context: LaunchContext, target: str | None) -> Launch:
    reader = reader_of(target) if target is not None else _recognised(path, text, context)
    try:
        launch = checked(reader, text, context)
        if target is None:
            _check_format(launch)
        return launch
    except RecursionError:
        raise InputError(f"{path}: nested too deeply") from None
    except InputError as error:
        is_known = reader.recognises(path.name, text) or reader.starts(text, context)
        raise (InputError if is_known else UnknownFileError)(f"{path}: {error}") from None


def _check_format(launch: Launch) -> None:
    """Raise an error for a file of which the reader knows the smaller part, as another program's."""
    foreign = sum(item.matters and item.why == NOT_KNOWN for item in launch.unread)
    known = len(launch.options) + len(launch.unread) - foreign + len(launch.silent)
    if foreign > known:
        raise InputError(
            f"{foreign} of its {foreign + known} settings are unknown to {launch.target}: if it is a file of "
            f"{launch.target} all the same, say so with --as {launch.target}"
        )


def read_launch_on(path: Path, context: LaunchContext, cluster: ClusterSpec, target: str | None = None) -> Launch:
    """Read the launch of the file on `cluster`; all its devices are used if the file leaves their number open."""
    try:
        launch = read_launch(path, context, target)
    except InputError:
        devices = {"num_devices": cluster.num_devices, "devices_per_node": cluster.devices_per_node}
        launch = read_launch(path, replace(context, **devices), target)  # type: ignore[arg-type]
    if launch.plan.num_devices != cluster.num_devices:
        raise InputError(
            f"{path}: starts {launch.plan.num_devices} devices, cluster {cluster.name!r} has {cluster.num_devices}: "
            "name the cluster that it runs on, or --set the variables that its script takes from the environment"
        )
    return launch


def read_launch_on_part(path: Path, context: LaunchContext, cluster: ClusterSpec) -> Launch:
    """Read the launch on `cluster` or a part of it; a file without a number of devices uses all of them."""
    with_nodes = replace(context, devices_per_node=cluster.devices_per_node)
    try:
        return read_launch(path, context)
    except InputError:
        pass
    try:
        return read_launch(path, with_nodes)
    except InputError:
        return read_launch(path, replace(with_nodes, num_devices=cluster.num_devices))


def reader_of(target: str) -> Reader:
    """Return the reader of a target."""
    readers = {reader.target: reader for reader in READERS}
    if target not in readers:
        raise InputError(f"no files of {target!r} are read: known are {', '.join(readers)}")
    return readers[target]


def looks_like_launch(path: Path, text: str) -> bool:
    """Return whether any target recognises the file as a launch file."""
    try:
        return any(reader.recognises(path.name, text) for reader in READERS)
    except RecursionError:
        return False


def _named_in(path: Path, text: str) -> Path | None:
    """Return the launch file that a script references in its folder, directly or through another file."""
    looked_at, scripts = {path}, [text]
    with suppress(OSError):  # an unreadable file is skipped
        files = [item for item in sorted(path.parent.iterdir()) if item.suffix not in _PAGES and is_file(item)]
        neighbours = [item for item in files if item.stat().st_size <= MAX_BYTES]
        while scripts:
            script = scripts.pop(0)
            for named_file in [item for item in neighbours if item not in looked_at and item.name in script]:
                inside = named_file.read_text(encoding="utf-8", errors="replace")
                if looks_like_launch(named_file, inside):
                    return named_file
                looked_at.add(named_file)
                scripts.append(inside)
    return None


def _program_in(path: Path, text: str) -> tuple[str, str | None] | None:
    """Return (the program that a script starts on its devices, the configuration that it is given)."""
    if path.suffix not in SUFFIXES:
        return None
    try:
        commands = read_script(text).commands
    except (InputError, RecursionError):
        return None
    for command in commands:
        words = list(command.words)
        if not any(_LAUNCHER.search(word) for word in words):
            continue
        programs = [at for at, word in enumerate(words) if word.endswith(".py") or words[at - 1 : at] == ["-m"]]
        if at := next((at for at in programs if not _LAUNCHER.search(words[at]) and words[at] != "debugpy"), None):
            configs = [word.rpartition("=")[2] for word in words[at + 1 :] if _CONFIG.search(word)]
            return words[at][-80:], next((config[-120:] for config in configs), None)
    return None


def _recognised(path: Path, text: str, context: LaunchContext) -> Reader:
    try:
        readers = [reader for reader in READERS if reader.recognises(path.name, text)]
        if not readers and path.suffix in SUFFIXES:
            readers = [reader for reader in READERS if reader.starts(text, context)]
    except RecursionError:
        raise InputError(f"{path}: nested too deeply") from None
    if len(readers) == 1:
        return readers[0]
    if not readers and (started := _named_in(path, text)):
        raise InputError(f"{path}: does not contain the plan: read {started}, which it starts")
    targets = [reader.target for reader in readers or READERS]
    looks = f"looks like a file of {' and '.join(targets)}" if readers else "is not a known launch file"
    if not readers and (program := _program_in(path, text)):
        name, config = program
        if config:
            raise UnknownFileError(
                f"{path}: is not a known launch file: it starts {name} with {config}: read that file"
            )
        looks = f"is not a known launch file: it starts {name}, which is not known here: if its options are"
        raise UnknownFileError(f"{path}: {looks} those of a format, name that with --as ({', '.join(targets)})")
    remedy = f"name its format with --as ({', '.join(targets)})"
    if not readers:
        remedy += ", or give its plan as options: autoplan estimate MODEL --tp N"
    raise (InputError if readers else UnknownFileError)(f"{path}: {looks}: {remedy}")
