"""Reader of the tables of the `aiconfigurator-core` wheel: times of kernels and collectives in autoplan's format.

NVIDIA's inference configurator ships timings of single kernels by device, serving framework and version as parquet
files under `systems/data` (Apache-2.0, https://github.com/ai-dynamo/aiconfigurator).  The tables stay in that wheel;
here they are only read, row by row.  They are medians of short benchmarks at burst clocks, faster than the same kernels
in training (`modelling` C2).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoplan.base.errors import InputError
from autoplan.base.units import cleaned
from autoplan.profiler.record import Fingerprint, Record
from autoplan.spec.measurement import Measurement
from autoplan.spec.operations import Operation

INSTALL = "pip install 'autoplan[reference]'"

# Folders in the wheel whose device has another id here; for other folders only the underscores are replaced.
_DEVICES = {"b200_sxm": "b200", "b300_sxm": "b300"}

# The wheel's names of element types; names not listed are the same.
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
_ELEMENT_BYTES = {"half": 2, "bfloat16": 2, "float16": 2, "int8": 1}
_COLLECTIVES: dict[str, Operation] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
}
_MS = 1e-3  # latencies are in milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """Columns of one kind of file: `shape` has those listed in `operations.SHAPES`, in the same order.

    A table of collectives has devices and elements instead (`modelling` D1: not bytes), for several operations.
    """

    file: str
    operations: frozenset[Operation]
    shape: tuple[str, ...]
    dtype: str
    remark: str = ""  # column with additional information about the kernel


_TABLES = (
    _Table(file="gemm_perf.parquet", operations=frozenset({"gemm"}), shape=("m", "n", "k"), dtype="gemm_dtype"),
    _Table(
        file="context_attention_perf.parquet",
        operations=frozenset({"attention"}),
        shape=("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim", "window_size"),
        dtype="attn_dtype",
    ),
    _Table(
        file="moe_perf.parquet",
        operations=frozenset({"experts"}),
        shape=("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size"),
        dtype="moe_dtype",
        remark="distribution",
    ),
    _Table(
        file="nccl_perf.parquet",
        operations=frozenset(_COLLECTIVES.values()),
        shape=("num_gpus", "message_size"),
        dtype="nccl_dtype",
    ),
    _Table(
        file="custom_allreduce_perf.parquet",
        operations=frozenset({"all_reduce"}),
        shape=("num_gpus", "message_size"),
        dtype="allreduce_dtype",
    ),
)
_OPTIONAL = {"window_size": 0, "kernel_source": ""}  # columns that older tables lack


def default_root() -> Path:
    """Return the folder of tables inside the installed wheel, found without importing the package."""
    package = importlib.util.find_spec("aiconfigurator_core")
    for place in (package.submodule_search_locations or ()) if package else ():
        if (Path(place) / "systems" / "data").is_dir():
            return Path(place) / "systems" / "data"
    raise InputError(f"the tables of aiconfigurator-core are not installed: {INSTALL}")


def device_of(folder: str) -> str:
    """Return autoplan's id of the device in a `folder` of the wheel."""
    return _DEVICES.get(folder, folder.replace("_", "-"))


def read_measurements(
    root: Path | None = None,
    *,
    devices: Collection[str] | None = None,
    operations: Collection[Operation] | None = None,
    dtypes: Collection[str] | None = None,
) -> Iterator[Measurement]:
    """Yield the timings under `root` (the installed wheel's tables by default), in the order of the files' paths.

    `devices` are autoplan's ids, `dtypes` autoplan's names of element types; None means all of them.  Rows are read in
    batches, so that memory does not grow with the wheel.  Raises an error in one line for a folder without tables, a
    file that is not parquet, a missing column or a time that is not positive.
    """
    root = root or default_root()
    num_tables = 0
    for path in sorted(root.glob("*/*/*/*/*_perf.parquet")):
        table = next((table for table in _TABLES if table.file == path.name), None)
        num_tables += table is not None
        if table is None or (operations is not None and table.operations.isdisjoint(operations)):
            continue
        if devices is not None and device_of(path.relative_to(root).parts[0]) not in devices:
            continue
        for measurement in _read_table(path, table, root, dtypes):
            if operations is None or measurement.operation in operations:
                yield measurement
    if not num_tables:
        raise InputError(f"{root}: no tables of aiconfigurator-core below it (DEVICE/FAMILY/FRAMEWORK/VERSION)")


def read_records(root: Path | None = None, *, devices: Collection[str] | None = None) -> Iterator[Record]:
    """Yield the timings as records with one sample, on a machine with only a known device."""
    for measurement in read_measurements(root, devices=devices):
        yield Record(
            fingerprint=Fingerprint(device=measurement.device),
            operation=measurement.operation,
            shape=measurement.shape,
            dtype=cleaned(measurement.dtype),
            samples_s=(measurement.seconds,),
            kernel=cleaned(measurement.kernel),
            mode="imported",
            source=cleaned(measurement.source),
        )


def _read_table(path: Path, table: _Table, root: Path, dtypes: Collection[str] | None) -> Iterator[Measurement]:
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"reading {path.name} needs pyarrow: {INSTALL}") from None
    words = None
    if dtypes is not None:
        words = pyarrow.array([*dtypes, *(word for word, name in _DTYPES.items() if name in dtypes)])
    device = device_of(path.relative_to(root).parts[0])
    source = f"aiconfigurator-core {path.parent.relative_to(root)}"
    column_names = [*table.shape, table.dtype, "latency", "kernel_source", *filter(None, [table.remark])]
    if not table.operations <= {"gemm", "attention", "experts"}:
        column_names.append("op_name")
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns_in_file = set(file.schema_arrow.names)
            if missing := [name for name in column_names if name not in columns_in_file and name not in _OPTIONAL]:
                raise InputError(f"{path}: lacks the column {missing[0]!r}: not a version of the table that is known")
            for batch in file.iter_batches(columns=[name for name in column_names if name in columns_in_file]):
                if words is not None:
                    batch = batch.filter(pyarrow.compute.is_in(batch.column(table.dtype), words))
                columns = [
                    batch.column(name).to_pylist() if name in columns_in_file else [_OPTIONAL[name]] * batch.num_rows
                    for name in column_names
                ]
                for cells in zip(*columns, strict=True):
                    yield _measurement(dict(zip(column_names, cells, strict=True)), table, device, source)
    except InputError as error:
        raise InputError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: a row cannot be read: {error!r}") from None


def _measurement(row: dict[str, Any], table: _Table, device: str, source: str) -> Measurement:
    shape = tuple(row[name] for name in table.shape)
    dtype = row[table.dtype]
    operation = next(iter(table.operations))
    if "op_name" in row:
        operation = _COLLECTIVES[row["op_name"]]
        # Measured inside one scale-up domain, one group at a time.
        shape = (shape[0], shape[0], 1, shape[1] * _ELEMENT_BYTES[dtype])
    return Measurement(
        operation=operation,
        shape=shape,
        dtype=_DTYPES.get(dtype, dtype),
        device=device,
        seconds=row["latency"] * _MS,
        kernel=f"{row['kernel_source']} {row.get(table.remark, '')}".strip(),
        source=source,
        is_burst=True,
    )
