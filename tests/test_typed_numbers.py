"""Do numbers mean the same wherever they are typed: in flags, in files, with or without units?"""

from __future__ import annotations

import tomllib
from pathlib import Path

import jsonschema
import pytest

from autoplan.api.training_run import parse_sizes
from autoplan.base.errors import InputError, UnpricedError
from autoplan.base.files import read_table
from autoplan.base.units import GIB
from autoplan.base.values import (
    parse_amount,
    parse_batches,
    parse_memory,
    parse_numbers,
    parse_positive,
    parse_size,
    parse_tokens,
)
from autoplan.readers.cluster import cluster_from_table, cluster_schema, load_cluster, preset_clusters
from autoplan.readers.device import load_device, preset_devices
from autoplan.readers.lengths import load_images, load_lengths
from autoplan.readers.model import load_model
from autoplan.runs.row import Row
from autoplan.spec.axes import AXIS
from commands import run

BOX = """name = "box"
num_nodes = 2
devices_per_node = 8
[device]
name = "card"
memory_gib = 80
memory_bandwidth_gb_per_s = 3350
peak_tflops = { bf16 = 900 }
[network]
kind = "roce"
nic_gb_per_s = 50
latency_us = 14
[host]
memory_gib = 2048
"""
TYPED = """name = "box"
num_nodes = "2"
devices_per_node = "8"
[device]
name = "card"
memory = "80GB"
memory_bandwidth = "3.35 TB/s"
peak = { bf16 = "900TFLOPS" }
[network]
kind = "roce"
nic = "400Gb/s"
latency = "14us"
[host]
memory_gib = "2TB"
"""


def box(folder: Path, text: str) -> str:
    (folder / "box.toml").write_text(text)
    return str(folder / "box.toml")


@pytest.mark.parametrize(
    ("text", "field", "amount"),
    [
        ("80GB", "memory_bytes", 80 * GIB),
        ("80 gib", "memory_bytes", 80 * GIB),
        ("1.5T", "memory_bytes", 1.5 * 2**40),
        ("900GB/s", "bandwidth_bytes_per_s", 9e11),
        ("400Gb/s", "nic_bytes_per_s", 5e10),
        ("400Gbps", "nic_bytes_per_s", 5e10),
        ("2.25PFLOPS", "peak_flops_per_s", 2.25e15),
        ("989 TFLOP/s", "peak_flops_per_s", 9.89e14),
        ("14us", "latency_s", 14e-6),
        ("1.4kW", "tdp_w", 1400),
        ("0.7", "efficiency", 0.7),
    ],
)
def test_amounts_are_typed_with_their_units(text: str, field: str, amount: float) -> None:
    assert parse_amount(text, "key", field, 1.0) == pytest.approx(amount)


@pytest.mark.parametrize(
    ("text", "field"),
    [("80", "memory_bytes"), ("3.35TB", "bandwidth_bytes_per_s"), ("80GB/s", "memory_bytes"), ("x", "latency_s")],
)
def test_amounts_without_their_unit_are_refused_by_their_key(text: str, field: str) -> None:
    with pytest.raises(InputError, match=f"^typed '{text}': write a number with its unit, such as "):
        parse_amount(text, "typed", field, None)


@pytest.mark.parametrize("text", ["400gb/s", "400gbps"])
def test_rates_that_may_be_bits_or_bytes_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=f"^nic '{text}': write 400GB/s for bytes or 400Gb/s for bits$"):
        parse_amount(text, "nic", "nic_bytes_per_s", 1.0)


def test_memory_is_binary_as_on_datasheets_and_data_is_decimal() -> None:
    assert parse_memory("4GB", "--reserve-memory") == parse_memory("4GiB", "--reserve-memory") == 4 * GIB
    assert parse_memory("0", "--reserve-memory") == 0
    assert parse_size("150kB", "--sample-size") == 150e3
    assert parse_size("1MiB", "--sample-size") == 2**20
    # Devices named by their memory: the name is the number of GiB.
    for name, gigabytes in (("h100-sxm", 80), ("a100-sxm-40", 40), ("rtx-5090", 32), ("mi300x", 192)):
        device = load_device(name)
        assert device is not None
        assert device.memory_bytes == parse_memory(f"{gigabytes}GB", "memory")


def test_files_take_numbers_with_units(tmp_path: Path) -> None:
    assert load_cluster(box(tmp_path, TYPED)) == load_cluster(box(tmp_path, BOX))


def test_files_of_models_take_counts_as_flags_do(tmp_path: Path) -> None:
    text = 'name = "m"\nnum_layers = 2\nhidden_size = "4k"\nnum_heads = 32\nffn_size = "14k"\nvocab_size = "32k"\n'
    (tmp_path / "m.toml").write_text(text)
    model = load_model(str(tmp_path / "m.toml"))
    assert (model.hidden_size, model.ffn_size, model.vocab_size) == (4096, 14 * 1024, 32 * 1024)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"80GB"', "80", "memory needs a unit: write memory_gib = 80 in device"),
        ('{ bf16 = "900TFLOPS" }', "{ bf16 = 900 }", "peak needs a unit: write peak_tflops = { bf16 = 900 } in device"),
        ('"80GB"', '"80"', "memory '80': write a number with its unit, such as 80GB"),
        ('"3.35 TB/s"', '"3.35TB"', "memory_bandwidth '3.35TB': write a number with its unit"),
        ('"900TFLOPS"', '"fast"', "peak.bf16 'fast': write a number with its unit, such as 989TFLOPS"),
        ('"400Gb/s"', '"400gb"', "nic '400gb': write a number with its unit, such as 900GB/s or 400Gb/s in network"),
        ('num_nodes = "2"', 'num_nodes = "two"', "num_nodes 'two': write a whole number"),
        ('memory = "80GB"', 'memory = "80GB"\nmemory_gib = 80', "'memory_gib' in device is given twice"),
        ('"80GB"', '"-80GB"', "memory must be a positive number, got '-80GB'"),
    ],
)
def test_faults_of_typed_numbers_keep_the_keys_of_the_file(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in TYPED
    path = box(tmp_path, TYPED.replace(old, new))
    with pytest.raises(InputError) as caught:
        load_cluster(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert says in str(caught.value)


def test_any_built_in_device_may_be_named_in_a_file() -> None:
    for device in preset_devices():
        cluster = cluster_from_table({"name": "own", "device": device, "devices_per_node": 4}, "own.toml")
        assert cluster.device == load_device(device)
        assert cluster.levels
    assert set(preset_devices()) <= {load_cluster(name).device.name for name in preset_clusters()}


def test_short_numbers_are_read_wherever_a_count_is_typed() -> None:
    assert parse_numbers("1k,2k", "--nodes") == (1024, 2048)
    assert parse_sizes("1k:1k") == (1024,)
    assert parse_batches("1k:4k") == (1024, 4096)
    assert AXIS["micro_batch"].parse("1k", "--fix") == 1024
    assert load_lengths("8k:1k").histogram == ((8192, 1024),)
    assert load_images("1:1k").histogram == ((1, 1024),)


def test_a_table_of_runs_may_have_short_numbers() -> None:
    row = Row({"seq_len": "8k", "global_batch": "1k", "tp": "2"})
    assert [row.integer(column) for column in ("seq_len", "global_batch", "tp")] == [8192, 1024, 2]
    with pytest.raises(UnpricedError, match="seq_len is not a number: 'eight k'"):
        Row({"seq_len": "eight k"}).integer("seq_len")


def test_amounts_of_tokens_and_money_are_decimal() -> None:
    assert parse_tokens("500k") == 5e5
    assert parse_positive("10k", "--gpu-hours") == 1e4
    assert parse_positive("1.5M", "--gpu-hours") == 1.5e6


def test_a_histogram_may_have_short_numbers(tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_text("tokens,samples\n8k,1k\n1k,10\n")
    assert dict(load_lengths(str(tmp_path / "lengths.csv")).histogram) == {8192: 1024, 1024: 10}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("run", "plan.json", "--steps", "0"), "--steps must be between 1 and"),
        (("run", "plan.json", "--warmup", "-1"), "--warmup must be between 0 and"),
        (("db", "list", "--limit", "many"), "--limit 'many': write a whole number"),
        (("replan", "plan.json", "--checkpoint-gbytes-per-s", "fast"), "such as 900GB/s or 400Gb/s"),
    ],
)
def test_limits_of_flags_are_one_line_that_names_the_flag(
    tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    done = run(tmp_path, *arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert says in done.stderr


def test_templates_say_how_numbers_may_be_typed(tmp_path: Path) -> None:
    assert run(tmp_path, "new", "device", "--out", "device.toml").returncode == 0
    assert read_table(tmp_path / "device.toml")["device"]["memory"] == "24GB"


def test_the_schema_for_editors_admits_numbers_with_units() -> None:
    described = cluster_schema()
    jsonschema.validate(tomllib.loads(TYPED), described)
    for old, new in (('memory = "80GB"', "memory = 80"), ('memory = "80GB"', 'memory = "80GB"\nmemory_gib = 80')):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(tomllib.loads(TYPED.replace(old, new)), described)
