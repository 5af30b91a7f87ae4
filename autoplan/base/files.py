"""Strict decoding of files into values, and atomic writing of files."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import tempfile
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

from autoplan.base.errors import InputError
from autoplan.base.names import close_names
from autoplan.base.units import bare_key, file_keys, file_units, first_faults, listed
from autoplan.base.value_faults import (
    dataclass_inside,
    number_inside,
    place_text,
    type_hints,
    typed_number,
    value_faults,
)

T = TypeVar("T")

# Far above any hand-written configuration; a weight file given by mistake is not read into memory.
MAX_BYTES = 8 * 2**20
MAX_DIGITS = 40  # of a number in YAML
MAX_KNOWN = 30  # keys in a message
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_text(path: Path, *, most_bytes: int = MAX_BYTES) -> str:
    """Return the text of a file of at most `most_bytes`."""
    try:
        size = path.stat().st_size
        if size > most_bytes:
            raise InputError(f"{path}: too large: {size:,} bytes, at most {most_bytes:,} are read")
        with path.open("rb") as stream:  # a device or pipe reports size 0: bound the read as well
            data = stream.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise InputError(f"{path}: too large: at most {most_bytes:,} bytes are read")
        return data.decode("utf-8").replace("\r\n", "\n")  # which Windows editors write
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except ValueError as error:  # a null byte in the name
        raise InputError(f"{path}: cannot be read: {error}") from None


def exists(path: Path) -> bool:
    """Return whether there is anything at `path`; False for inaccessible paths and impossible names."""
    try:
        return path.exists()
    except (OSError, ValueError):  # for example too long for a file name, or with a null byte
        return False


def of_user(text: str) -> Path:
    """Return the path of a text in which ~ or ~NAME stands for a home folder; raises InputError if there is none."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise InputError(f"{text}: there is no such home folder: write the whole path") from None


def own_folder(kind: Literal["data", "cache"]) -> Path:
    """Return the folder for autoplan's own files of this user; raises InputError for a user without a home folder."""
    from platformdirs import user_cache_path, user_data_path

    with suppress(RuntimeError):
        path = (user_data_path if kind == "data" else user_cache_path)("autoplan", appauthor=False)
        if path.is_absolute():  # platformdirs before 4.14 answers ~/...
            return path
    raise InputError(f"this user has no home folder to keep autoplan's {kind} in: set HOME to a folder")


def is_file(path: Path) -> bool:
    """Return whether `path` is an existing file; False in the same cases as `exists`."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """Return whether `path` is an existing folder; False in the same cases as `exists`."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        raise InputError(f"key {next(key for key in keys if keys.count(key) > 1)[:60]!r} is given twice")
    return table


def parse_json(text: str, title: object) -> Any:
    """Return the value in `text`; a key that a table has twice is an error, and a syntax error names its place."""
    return _parsed(partial(json.loads, object_pairs_hook=_once), text, title)


def parse_yaml(text: str, title: object) -> Any:
    """Return the value in `text`, which may contain only plain values: tags for other objects are an error."""
    import yaml  # slow to load compared with a whole search

    class PlainValues(yaml.SafeLoader):  # type: ignore[misc]  # in Python, which bounds the depth
        def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
            if len(node.value) > MAX_DIGITS:  # hexadecimal ones have no limit of Python's
                raise ValueError(f"a number of {len(node.value):,} digits")
            return int(super().construct_yaml_int(node))

    PlainValues.add_constructor("tag:yaml.org,2002:int", PlainValues.construct_yaml_int)
    try:
        return yaml.load(text, Loader=PlainValues)
    except RecursionError:
        raise InputError(f"{title}: nested too deeply") from None
    except (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        # ValueError and those after it: such as the date 2026-99-99
        raise InputError(f"{title}: not valid YAML: {' '.join(str(error).split())[:200]}") from None


def _parsed(parse: Callable[[str], Any], text: str, title: object) -> Any:
    try:
        return parse(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{title}: not valid TOML: {error}") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{title}: not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})") from None
    except RecursionError:
        raise InputError(f"{title}: nested too deeply") from None
    except ValueError as error:  # an integer too long to convert
        raise InputError(f"{title}: {' '.join(str(error).split())[:200]}") from None


def read_table(path: Path) -> dict[str, Any]:
    """Return the table in a TOML or JSON file; a syntax error contains the line and column."""
    text = read_text(path).removeprefix("\ufeff")  # the byte order mark that Windows editors write
    table = _parsed(tomllib.loads, text, path) if path.suffix == ".toml" else parse_json(text, path)
    if not isinstance(table, dict):
        raise InputError(f"{path}: must contain one table (object), not a {type(table).__name__}")
    if _SURROGATE.search(text):  # JSON may contain half a surrogate pair, which cannot be encoded again
        try:
            json.dumps(table, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise InputError(f"{path}: contains text that is not Unicode") from None
    return table


@cache
def shipped(folder: str = "") -> dict[str, Path]:
    """Return the TOML files in a folder of presets, by their ids in alphabetical order."""
    entries = (Path(str(entry)) for entry in (resources.files("autoplan.presets") / folder).iterdir())
    files = {path.stem: path for path in entries if path.suffix == ".toml"}
    return dict(sorted(files.items()))


def decode(kind: type[T], table: dict[str, Any], where: str) -> T:
    """Decode `table` as the dataclass `kind`; unknown keys, missing keys and wrong types are errors.

    Keys may have the human units of `units.FILE_UNITS`, and numbers may be text with a unit (`memory = "80GB"`).
    `where` names the file in messages, which have all unknown and missing keys, or all wrong values.  A class with
    `check_table` checks a table before its keys are checked.
    """
    import msgspec  # here and below: not needed for a help page

    written: dict[str, tuple[str, float]] = {}
    fields: dict[str, Any] = {}
    try:
        fields = to_fields(kind, table, written=written)
        return msgspec.convert(fields, kind, strict=True)
    except UnicodeEncodeError:
        raise InputError(f"{where}: contains text that is not Unicode") from None
    except OverflowError:
        raise InputError(f"{where}: contains a number that is too large") from None
    except RecursionError:
        raise InputError(f"{where}: nested too deeply") from None
    except msgspec.ValidationError:
        raise InputError(f"{where}: {first_faults(value_faults(kind, fields, kind, '$', written))}") from None
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _scaled(value: Any, factor: float) -> Any:
    if isinstance(value, dict):
        return {key: _scaled(part, factor) for key, part in value.items()}
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value  # the decoder reports the error
    try:
        return value * factor
    except OverflowError:  # an integer beyond the range of floats, treated like infinity
        return math.inf


def _numbered(value: Any, key: str, field: str, number: type, factor: float | None) -> Any:
    """Return numbers in SI, also those that a file has as text; text that is no number is left to the decoder."""
    if isinstance(value, dict):
        return {part: _numbered(inner, key, field, number, factor) for part, inner in value.items()}
    if isinstance(value, str):
        try:
            return typed_number(value, key, field, number, factor)
        except InputError:
            return value
    return value if factor in (None, 1.0) else _scaled(value, factor)


def _has_bare_number(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_bare_number, value.values()))
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    return (
        "{ " + ", ".join(f"{key} = {part}" for key, part in value.items()) + " }"
        if isinstance(value, dict)
        else str(value)
    )


def to_fields(
    kind: type,
    table: dict[str, Any],
    path: str = "$",
    written: dict[str, tuple[str, float]] | None = None,
    needed: Collection[str] | None = None,
    faults: list[str] | None = None,
) -> dict[str, Any]:
    """Return `table` with the fields of the dataclass `kind` as keys, converting human units to SI.

    Unknown and missing keys are errors, of all tables in one message, or added to `faults`; `needed` are the required
    fields, by default those without a default.  `written` collects, by the place of a field, its key in the file and
    the factor of that key's unit.
    """
    hints = type_hints(kind)
    fields: dict[str, Any] = {}
    unknown: list[str] = []
    written = {} if written is None else written
    found: list[str] = [] if faults is None else faults
    check_table: Callable[[Mapping[str, Any]], None] | None = getattr(kind, "check_table", None)
    if check_table is not None:
        check_table(table)
    for key, value in table.items():
        name, factor = _field_of(key, hints)
        if name is None:
            unknown.append(key)
            continue
        written[f"{path}.{name}"] = (key, factor or 1.0)
        if number := number_inside(hints[name]):
            value = _numbered(value, key, name, number, factor)
            if factor is None and _has_bare_number(table[key]):
                found.append(f"{key} needs a unit: write {file_keys(name)[0]} = {_shown(table[key])}{place_text(path)}")
        elif factor not in (None, 1.0):
            value = _scaled(value, factor)
        if name in fields:
            raise InputError(f"{key!r}{place_text(path)} is given twice, in different units")
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{key}{place_text(path)} must be a finite number, got {value}")
        inner, is_sequence = dataclass_inside(hints[name])
        if inner and isinstance(value, dict):
            value = to_fields(inner, value, f"{path}.{key}", written, faults=found)
        elif inner and is_sequence and isinstance(value, list):
            value = [
                to_fields(inner, part, f"{path}.{key}[{at}]", written, faults=found) if isinstance(part, dict) else part
                for at, part in enumerate(value)
            ]
        fields[name] = value
    missing = [name for name in (_required(kind) if needed is None else needed) if name not in fields]
    if unknown or missing:
        found.append(_key_faults(unknown, missing, hints, path))
    if found and faults is None:
        raise InputError(first_faults(found))
    return fields


def _field_of(key: str, hints: Collection[str]) -> tuple[str | None, float | None]:
    """Return (the field that a key gives, None for an unknown key; the unit of its bare numbers in SI, if any)."""
    if key in hints:
        return key, 1.0
    for field in hints:
        for human, inside, factor in file_units(field):
            if key == field[: -len(inside)] + human:
                return field, factor
        if key == bare_key(field):
            return field, None
    return None, None


def _key_faults(unknown: Sequence[str], missing: Sequence[str], hints: Collection[str], path: str) -> str:
    """Describe unknown and missing keys."""
    keys, faults = sorted(file_keys(hint)[0] for hint in hints), []
    if unknown:
        faults.append(f"unknown key{'s' * (len(unknown) > 1)} {listed(_with_close_key(key, keys) for key in unknown)}")
    if missing:
        faults.append(f"missing {', '.join(file_keys(name)[0] for name in missing)}")
    more = f", and {len(keys) - MAX_KNOWN} more" if len(keys) > MAX_KNOWN else ""
    is_strange = any(not close_names(str(key), keys, most=1) for key in unknown)
    known = f"; known: {', '.join(keys[:MAX_KNOWN])}{more}" if is_strange else ""
    return f"{' and '.join(faults)}{place_text(path)}{known}"


def _with_close_key(key: object, keys: Sequence[str]) -> str:
    """Return an unknown key in quotes, with the one that it may stand for."""
    if not isinstance(key, str):  # of YAML, where `true:` and `1:` are no text
        return f"of type {type(key).__name__}"
    return f"{key!r}" + "".join(f" ({close}?)" for close in close_names(key, keys, most=1))


def _required(kind: type) -> list[str]:
    return [
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]


def encode(value: object) -> str:
    """Encode a dataclass for `decode`: JSON in SI units, the same text for the same value."""
    import msgspec

    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n"


def encode_line(value: object) -> str:
    """Return a value as JSON in one line."""
    import msgspec

    return msgspec.json.encode(value).decode() + "\n"


@contextmanager
def refused_writes(path: Path | None) -> Iterator[None]:
    """Convert system errors from writing `path` into InputError."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from None


def check_target(path: Path, *, force: bool) -> None:
    """Raise an error if `path` exists without `force`, even as a dangling link, or is anything but a regular file."""
    try:
        with refused_writes(path):
            exists = path.exists()
            if exists and path.is_dir():
                raise InputError(f"{path} is a folder: name a file")
            if exists and not path.is_file():
                raise InputError(f"{path} is a device, pipe or socket: name a regular file")
            if (exists or path.is_symlink()) and not force:
                raise InputError(f"{path} exists: choose another name or pass --force")
            path.resolve()
    except RuntimeError:
        raise InputError(f"{path}: cannot be written: its links form a loop") from None


@contextmanager
def replacing(path: Path, *, force: bool = False, executable: bool = False) -> Iterator[BinaryIO]:
    """Yield a stream whose bytes replace the file at the end of the block, or not at all, as in `write_text`."""
    check_target(path, force=force)
    temporary: Path | None = None
    try:
        with refused_writes(path):
            target = path.resolve()
            handle, name = tempfile.mkstemp(prefix=".autoplan-", dir=target.parent)
            temporary = Path(name)
            with os.fdopen(handle, "wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            umask = os.umask(0)
            os.umask(umask)
            temporary.chmod((0o777 if executable else 0o666) & ~umask)
            temporary.replace(target)
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _holds(path: Path, data: bytes) -> bool:
    """Return whether the file exists with exactly these bytes."""
    try:
        return path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data
    except (OSError, RuntimeError):  # unreadable, or a loop of links
        return False


def write_text(path: Path, text: str, *, force: bool = False, executable: bool = False) -> None:
    """Write a file completely or not at all; different text needs `force`; links are followed."""
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(f"{path}: cannot be written: the text is not Unicode") from None
    if not force and _holds(path, data):
        return
    with replacing(path, force=force, executable=executable) as stream:
        stream.write(data)


def _check_folder(path: Path, *, force: bool) -> None:
    """Raise an error if `path` exists and is no folder, or is a folder with content and `force` is not set."""
    with refused_writes(path):
        if path.is_dir():
            if not force and any(path.iterdir()):
                raise InputError(f"{path} exists: choose another name or pass --force")
        elif path.exists() or path.is_symlink():
            raise InputError(f"{path} exists and is no folder: choose another name")


def write_folder(path: Path, texts: dict[str, tuple[str, bool]], *, force: bool = False) -> None:
    """Write a folder of (text, executable) by name: a new one completely or not at all, an existing one with `force`.

    In an existing folder all files are first written next to the old ones and then replaced one by one; other files
    are kept, such as a running job's log or checkpoints.  A folder that already contains these texts is unchanged.
    """
    for name in texts:
        if name in ("", ".", "..") or Path(name).name != name or "\0" in name:
            raise InputError(f"{name!r} is no name of a file")
    if texts and not force and all(_holds(path / name, text.encode()) for name, (text, _) in texts.items()):
        return
    _check_folder(path, force=force)
    for name in texts:
        if (path / name).is_dir():
            raise InputError(f"{path / name} is a folder: choose another name for its own")
    with refused_writes(path):
        is_new = not path.is_dir()
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".autoplan-", dir=path.parent if is_new else path) as scratch:
            folder = Path(scratch) / "made"
            folder.mkdir()
            for name, (text, executable) in texts.items():
                write_text(folder / name, text, executable=executable)
            if is_new:
                folder.rename(path)
            else:
                for name in texts:
                    (folder / name).replace(path / name)
