"""Are files read strictly, refused in one line, and written whole or not at all?"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from autoplan.base.errors import InputError
from autoplan.base.files import (
    MAX_BYTES,
    check_target,
    decode,
    of_user,
    own_folder,
    read_table,
    read_text,
    write_folder,
    write_text,
)
from autoplan.base.json_schema import schema
from autoplan.base.units import FILE_UNITS
from autoplan.frameworks.presets import framework_schema
from autoplan.frameworks.registry import facts_files
from autoplan.readers.cluster import cluster_schema
from autoplan.readers.device import device_schema
from autoplan.spec.framework import GROUP_OF, GROUPS, Framework
from autoplan.spec.model import ModelSpec
from autoplan.topology.cluster import ClusterSpec, DeviceSpec

DEVICE: dict[str, Any] = {
    "name": "lab",
    "vendor": "nvidia",
    "generation": "hopper",
    "memory_gib": 80.0,
    "visible_memory_gib": 79,
    "memory_bandwidth_gb_per_s": 3350.0,
    "compute_units": 132,
    "tdp_w": 700.0,
    "host_link_gb_per_s": 64.0,
    "gemm_efficiency": 0.7,
    "memory_efficiency": 0.87,
    "peak_tflops": {"bf16": 989.4},
}
CLUSTER: dict[str, Any] = {
    "name": "lab",
    "device": DEVICE,
    "num_nodes": 2,
    "devices_per_node": 8,
    "levels": [{"name": "nvlink", "kind": "nvlink", "num_devices": 8, "bandwidth_gb_per_s": 450.0, "latency_us": 1.5}],
    "network": {"kind": "infiniband", "nic_gb_per_s": 50.0, "half_rate_mib": 32.0},
}


def device(**changes: Any) -> DeviceSpec:
    return decode(DeviceSpec, {**DEVICE, **changes}, "lab.toml")


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def refusal(kind: type, table: dict[str, Any]) -> str:
    with pytest.raises(InputError) as caught:
        decode(kind, table, "lab.toml")
    message = str(caught.value)
    assert message.startswith("lab.toml: ")
    assert "\n" not in message
    return message


# -- decoding ---------------------------------------------------------------------------------------------------------


def test_human_units_become_si_inside() -> None:
    lab = decode(ClusterSpec, CLUSTER, "lab.toml")
    assert lab.device.memory_bytes == 80 * 2**30
    assert lab.device.visible_memory_bytes == 79 * 2**30
    assert lab.device.memory_bandwidth_bytes_per_s == 3350e9
    assert lab.device.peak_flops_per_s == {"bf16": 989.4e12}
    assert lab.levels[0].bandwidth_bytes_per_s == 450e9
    assert lab.levels[0].latency_s == pytest.approx(1.5e-6, rel=1e-15)
    assert lab.network.half_rate_bytes == 32 * 2**20


def test_the_si_name_of_a_field_is_accepted_unscaled() -> None:
    table = {key: value for key, value in DEVICE.items() if key != "memory_gib"}
    assert decode(DeviceSpec, {**table, "memory_bytes": 8e10}, "lab.toml").memory_bytes == 8e10


@pytest.mark.parametrize("key", ["memory_bandwidth_bytes_per_us", "memory_bandwidth_bytes_per_ms"])
def test_a_rate_per_microsecond_is_refused(key: str) -> None:
    table = {other: value for other, value in DEVICE.items() if other != "memory_bandwidth_gb_per_s"}
    assert key in refusal(DeviceSpec, {**table, key: 3.35e6})


def test_one_quantity_in_two_units_is_refused() -> None:
    assert "given twice" in refusal(DeviceSpec, {**DEVICE, "memory_bytes": 8e10})


def test_an_unknown_key_is_refused_with_its_place_and_the_known_keys() -> None:
    message = refusal(ClusterSpec, {**CLUSTER, "network": {**CLUSTER["network"], "nic_gbps": 400}})
    assert "'nic_gbps'" in message
    assert " in network" in message
    assert "nic_gb_per_s" in message


def test_an_unknown_key_in_a_list_names_the_element() -> None:
    levels = [CLUSTER["levels"][0], {**CLUSTER["levels"][0], "num_devices": 16, "speed": 1}]
    assert "unknown key 'speed' in levels[1]" in refusal(ClusterSpec, {**CLUSTER, "levels": levels})


def test_all_wrong_keys_are_named_at_once_and_so_are_all_wrong_values() -> None:
    network = CLUSTER["network"]
    message = refusal(ClusterSpec, {**CLUSTER, "nods": 2, "network": {**network, "nic_gbps": 400}})
    assert "'nods' (nodes?)" in message
    assert "'nic_gbps' (nic_gb_per_s?) in network" in message
    wrong = {
        "num_nodes": "4 nodes",
        "network": {**network, "kind": "infinband", "nic_gb_per_s": "50GB"},
        "host": {"memory_gib": 0},
    }
    message = refusal(ClusterSpec, {**CLUSTER, **wrong})
    assert "num_nodes '4 nodes': write a whole number" in message
    assert "network.kind must be one of infiniband" in message
    assert "nic_gb_per_s '50GB': write a number with its unit, such as 900GB/s or 400Gb/s in network" in message
    assert "memory_gib must be a positive finite number, got 0 in host" in message


def test_of_many_faults_the_first_are_named_and_the_others_counted() -> None:
    levels = [{**CLUSTER["levels"][0], "bandwidth_gb_per_s": "fast " * 8, "num_devices": -1}] * 40
    assert re.search(r"; and \d\d faults more$", message := refusal(ClusterSpec, {**CLUSTER, "levels": levels}))
    assert len(message) < 1500


@pytest.mark.parametrize("key", ["name", "memory_gib", "peak_tflops"])
def test_a_missing_key_is_refused(key: str) -> None:
    message = refusal(DeviceSpec, {other: value for other, value in DEVICE.items() if other != key})
    assert "missing" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("memory_gib", "eighty"),
        ("memory_gib", True),
        ("memory_gib", None),
        ("memory_gib", [80.0]),
        ("memory_gib", {"a": 1.0}),
        ("compute_units", 132.5),
        ("compute_units", "132.5"),
        ("name", 5),
        ("vendor", "acme"),
        ("peak_tflops", 989.4),
        ("peak_tflops", {"bf16": "989W"}),
        ("peak_tflops", {"int8": 1979.0}),
        ("sources", "one source"),
        ("sources", [1]),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(key: str, value: Any) -> None:
    refusal(DeviceSpec, {**DEVICE, key: value})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -80.0, 0.0, 1.1e30, -0.0])
@pytest.mark.parametrize("key", ["memory_gib", "memory_bandwidth_gb_per_s", "tdp_w"])
def test_a_quantity_out_of_range_is_refused(key: str, value: float) -> None:
    refusal(DeviceSpec, {**DEVICE, key: value})


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 0.0, 1e30])
def test_a_peak_rate_out_of_range_is_refused(value: float) -> None:
    assert "peak_tflops.bf16" in refusal(DeviceSpec, {**DEVICE, "peak_tflops": {"bf16": value}})


@pytest.mark.parametrize("value", [10**30, -1, 0])
def test_a_count_out_of_range_is_refused(value: int) -> None:
    assert "compute_units" in refusal(DeviceSpec, {**DEVICE, "compute_units": value})


@pytest.mark.parametrize("value", [10**400, -(10**400)], ids=["positive", "negative"])
def test_an_integer_too_long_for_a_float_is_refused(value: int) -> None:
    refusal(DeviceSpec, {**DEVICE, "memory_gib": value})


@pytest.mark.parametrize("depth", [400, 900])
def test_a_value_nested_deeply_is_refused(depth: int) -> None:
    nested: Any = 1.0
    for _ in range(depth):
        nested = {"a": nested}
    refusal(DeviceSpec, {**DEVICE, "memory_gib": nested})


def test_a_word_that_is_not_unicode_is_refused() -> None:
    refusal(DeviceSpec, {**DEVICE, "vendor": "\ud800"})


def test_a_bad_value_deep_inside_names_its_place() -> None:
    levels = [{**CLUSTER["levels"][0], "efficiency": 1.5}]
    message = refusal(ClusterSpec, {**CLUSTER, "levels": levels})
    assert "efficiency must be above 0 and at most 1, got 1.5" in message
    assert " in levels[0]" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("reserved_factor", math.nan),
        ("reserved_factor", math.inf),
        ("pads_vocab_to", 0),
        ("pads_vocab_to", -128),
        ("fsdp_unhidden_share", -1.0),
        ("fsdp_unhidden_share", math.nan),
        ("bytes_per_reduced_grad", -1.0),
        ("bytes_per_reduced_grad", math.nan),
        ("bytes_moved_per_update", math.inf),
        ("bytes_per_weight", -2.0),
        ("step_overhead_s", math.nan),
        ("tp_overlap_share", 1.5),
    ],
)
def test_a_trait_of_a_framework_out_of_range_is_refused(key: str, value: float) -> None:
    assert key in refusal(Framework, {"name": "lab", key: value})
    assert key in refusal(Framework, {"name": "lab", GROUP_OF[key]: {key: value}})


PLACED: Any = [
    ({"device": {**DEVICE, "memory_gib": -80}}, "memory_gib must be a positive finite number, got -80 in device"),
    (
        {"device": {**DEVICE, "peak_tflops": {"bf16": -9.5}}},
        "peak_tflops.bf16 must be a positive finite number, got -9.5",
    ),
    (
        {"levels": [{**CLUSTER["levels"][0], "half_rate_mib": 0}]},
        "half_rate_mib must be a positive finite number, got 0",
    ),
    ({"levels": [{**CLUSTER["levels"][0], "half_rate_bytes": -3}]}, "half_rate_bytes must be a positive finite number"),
    ({"network": {**CLUSTER["network"], "latency_ms": -2}}, "latency_ms must be a positive finite number, got -2"),
    (
        {"levels": [{**CLUSTER["levels"][0], "kind": "nvlnk"}]},
        "levels[0].kind must be one of nvlink, xgmi, ethernet, pcie, shared_memory, got 'nvlnk'",
    ),
    ({"host": {"memory_gib": 0}}, "memory_gib must be a positive finite number, got 0 in host"),
]


@pytest.mark.parametrize(("change", "says"), PLACED)
def test_a_quantity_out_of_range_is_named_by_the_key_and_in_the_unit_of_the_file(
    change: dict[str, Any], says: str
) -> None:
    assert says in refusal(ClusterSpec, {**CLUSTER, **change})


def test_each_of_two_tables_is_named_by_its_own_key() -> None:
    inner = {**CLUSTER["levels"][0], "num_devices": 2}
    outer = {**{key: value for key, value in inner.items() if key != "latency_us"}, "num_devices": 8, "latency_ms": -4}
    message = refusal(ClusterSpec, {**CLUSTER, "levels": [inner, outer]})
    assert "latency_ms must be a positive finite number, got -4 in levels[1]" in message


def test_bytes_per_element_of_a_framework_are_not_offered_in_gib() -> None:
    message = refusal(Framework, {"name": "lab", "memory": {"nonsense": 1}})
    sizes = [key.rstrip(",") for key in message.split() if key.rstrip(",").endswith("gib")]
    assert sizes == ["bucket_gib", "communicator_gib", "fixed_gib"]
    assert "bytes_per_logit" in message


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize("kind", [ClusterSpec, DeviceSpec, ModelSpec, Framework])
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(junk=st.data())
def test_junk_in_any_field_is_an_input_error_or_a_value(kind: type, junk: st.DataObject) -> None:
    names = [field.name for field in fields(kind)]
    table = dict({ClusterSpec: CLUSTER, DeviceSpec: DEVICE}.get(kind, {"name": "lab"}))
    key = junk.draw(st.sampled_from([*names, "latency_us", "memory_gib", "peak_tflops"]) | st.text(max_size=10))
    table[key] = junk.draw(json_values)
    said = ""
    try:
        assert isinstance(decode(kind, table, "lab.toml"), kind)
    except InputError as error:
        said = str(error)
    assert "\n" not in said


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(max_size=12), json_values, max_size=5))
def test_a_junk_table_is_never_a_cluster(table: dict[str, Any]) -> None:
    refusal(ClusterSpec, table)


# -- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("a.toml", "a = 1\nb = \n", "line 2"),
        ("a.toml", "a = 1\na = 2\n", "line 2"),
        ("a.toml", "[a\n", "line 1"),
        ("a.toml", 'a = "unclosed', "end of document"),
        ("a.json", '{"a": 1,\n "b": }', "line 2, column 7"),
        ("a.json", "", "line 1, column 1"),
    ],
)
def test_a_malformed_file_is_refused_with_the_place(tmp_path: Path, name: str, text: str, place: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=place) as caught:
        read_table(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_key_given_twice_in_json_is_refused_as_in_toml(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": 1, "a": 2}')
    with pytest.raises(InputError, match="a"):
        read_table(path)


@pytest.mark.parametrize("text", ["[1, 2]", "3", '"word"', "null"])
def test_a_json_file_that_holds_no_table_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(InputError, match="must contain one table"):
        read_table(path)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400"])
def test_numbers_of_a_json_file_that_are_not_finite_are_refused(tmp_path: Path, number: str) -> None:
    path = tmp_path / "lab.json"
    path.write_text(json.dumps(DEVICE).replace("700.0", number))
    with pytest.raises(InputError, match="tdp_w"):
        decode(DeviceSpec, read_table(path), str(path))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", '{"a":' * 5000 + "1" + "}" * 5000),
        ("a.toml", "a = " + "[" * 5000 + "]" * 5000),
        ("a.json", '{"a": ' + "9" * 5000 + "}"),
        ("a.toml", "a = " + "9" * 5000),
        ("a.json", '{"command": "\\ud800"}'),
    ],
)
def test_files_meant_to_break_the_parser_are_refused(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InputError):
        read_table(path)


def test_a_file_that_is_not_text_is_refused_with_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes(b"name = '\xff'")
    with pytest.raises(InputError, match=r"not UTF-8 text \(byte 8\)"):
        read_text(path)


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "weights.toml"
    with path.open("wb") as stream:
        stream.truncate(MAX_BYTES + 1)  # sparse: it takes no disk
    with pytest.raises(InputError, match="too large"):
        read_text(path)


def test_an_endless_device_is_refused() -> None:
    with pytest.raises(InputError, match="too large"):
        read_text(Path("/dev/zero"))


@pytest.mark.parametrize("name", ["missing.toml", "a" * 300 + ".toml", "folder.toml"])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(InputError, match="cannot be read"):
        read_table(tmp_path / name)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.binary(max_size=200), suffix=st.sampled_from([".toml", ".json"]))
@example(data=b"a = 1979-05-27T07:32:00Z", suffix=".toml")
@example(data=b'{"\\ud800": 1}', suffix=".json")
def test_junk_bytes_are_an_input_error_or_a_table(tmp_path: Path, data: bytes, suffix: str) -> None:
    path = tmp_path / f"junk{suffix}"
    path.write_bytes(data)
    said = ""
    try:
        assert isinstance(read_table(path), dict)
    except InputError as error:
        said = str(error)
    assert "\n" not in said


# -- schema -----------------------------------------------------------------------------------------------------------


def definitions(kind: type, *, human_units: bool = True) -> dict[str, Any]:
    return schema(kind, human_units=human_units)["$defs"]


def test_the_schema_of_a_cluster_uses_human_keys() -> None:
    found = definitions(ClusterSpec)
    assert "memory_gib" in found["DeviceSpec"]["properties"]
    assert "peak_tflops" in found["DeviceSpec"]["properties"]
    assert "bandwidth_gb_per_s" in found["LinkLevel"]["properties"]
    assert {"half_rate_mib", "half_rate_gib"} <= set(found["NetworkSpec"]["properties"])


def test_the_schema_asks_for_one_key_of_every_required_quantity() -> None:
    link = definitions(ClusterSpec)["LinkLevel"]
    asked = [[alternative["required"] for alternative in each["oneOf"]] for each in link["allOf"]]
    assert [["bandwidth_gb_per_s"], ["bandwidth"], ["bandwidth_bytes_per_s"]] in asked
    assert [["latency_us"], ["latency_ms"], ["latency"], ["latency_s"]] in asked
    assert link["required"] == ["name", "kind", "num_devices"]


def test_the_schema_in_si_keeps_the_names_of_the_fields() -> None:
    properties = definitions(DeviceSpec, human_units=False)["DeviceSpec"]["properties"]
    assert set(properties) == {field.name for field in fields(DeviceSpec)}


def test_the_schema_refuses_unknown_keys_as_the_decoder_does() -> None:
    for definition in definitions(ClusterSpec).values():
        assert definition.get("additionalProperties") is False


def test_a_schema_is_json() -> None:
    json.dumps(schema(ClusterSpec, human_units=True))
    json.dumps(schema(ModelSpec, human_units=True))


def test_every_required_key_of_a_schema_is_one_of_its_properties() -> None:
    for kind in (ClusterSpec, ModelSpec):
        for definition in definitions(kind).values():
            assert set(definition.get("required", [])) <= set(definition.get("properties", {}))


def faults(value: Any, rule: dict[str, Any], whole: dict[str, Any], place: str = "$") -> list[str]:
    """Faults that `rule`, a part of the JSON Schema `whole`, finds wrong with `value`."""
    found: list[str] = []
    if "$ref" in rule:
        found += faults(value, whole["$defs"][rule["$ref"].rpartition("/")[2]], whole, place)
    for part in rule.get("allOf", []):
        found += faults(value, part, whole, place)
    for word in ("anyOf", "oneOf"):
        fitting = [part for part in rule.get(word, []) if not faults(value, part, whole, place)]
        if word in rule and (not fitting or (word == "oneOf" and len(fitting) > 1)):
            found.append(f"{place}: {len(fitting)} of {word}")
    kinds: dict[str, Any] = {
        "object": dict,
        "array": list,
        "string": str,
        "boolean": bool,
        "integer": int,
        "number": (int, float),
        "null": type(None),
    }
    if "type" in rule:
        is_kind = isinstance(value, kinds[rule["type"]]) and (rule["type"] == "boolean" or not isinstance(value, bool))
        if not is_kind:
            return [*found, f"{place}: not of type {rule['type']}"]
    if "enum" in rule and value not in rule["enum"]:
        found.append(f"{place}: not in enum")
    if isinstance(value, list) and isinstance(rule.get("items"), dict):
        found += [
            fault for at, part in enumerate(value) for fault in faults(part, rule["items"], whole, f"{place}[{at}]")
        ]
    if isinstance(value, dict):
        found += [f"{place}: lacks {key}" for key in rule.get("required", []) if key not in value]
        properties, others = rule.get("properties", {}), rule.get("additionalProperties", True)
        for key, part in value.items():
            if key in properties or isinstance(others, dict):
                found += faults(part, properties.get(key, others), whole, f"{place}.{key}")
            elif not others:
                found.append(f"{place}: unknown key {key}")
    return found


def shipped(folder: str) -> list[Path]:
    if folder == "frameworks":
        return list(facts_files().values())
    entries = (resources.files("autoplan.presets") / folder).iterdir()
    return sorted(Path(str(entry)) for entry in entries if entry.name.endswith(".toml"))


SCHEMAS = {
    "clusters": cluster_schema(),
    "devices": device_schema(),
    "frameworks": framework_schema(),
    "models": schema(ModelSpec, human_units=True),
}


@pytest.mark.parametrize("path", [path for folder in SCHEMAS for path in shipped(folder)], ids=lambda path: path.stem)
def test_every_shipped_file_obeys_its_schema(path: Path) -> None:
    described = SCHEMAS["frameworks" if path.parent.name == "facts" else path.parent.name]
    assert faults({"name": path.stem, **read_table(path)}, described, described) == []


@pytest.mark.parametrize(
    "change",
    [
        {"speed": 1},
        {"device": "no-such"},
        {"devices_per_node": 8.5},
        {"num_nodes": True},
        {"levels": [{**CLUSTER["levels"][0], "bandwidth_bytes_per_s": 1e9}]},
        {"network": {"kind": "pigeon", "nic_gb_per_s": 50.0}},
        {"network": {"kind": "infiniband"}},
    ],
)
def test_the_schema_of_a_cluster_refuses_what_the_decoder_refuses(change: dict[str, Any]) -> None:
    described = SCHEMAS["clusters"]
    assert faults(CLUSTER, described, described) == []
    assert faults({**CLUSTER, **change}, described, described) != []


@pytest.mark.parametrize("kind", [ClusterSpec, Framework])
def test_defaults_in_a_schema_stand_in_the_unit_of_their_key(kind: type) -> None:
    for definition in definitions(kind).values():
        properties = definition.get("properties", {})  # an enumeration has none
        for human, inside, factor in FILE_UNITS:
            for key in properties:
                si = properties.get(key.removesuffix(human) + inside) if key.endswith(human) else None
                if si and si.get("default") is not None:
                    assert properties[key]["default"] * factor == pytest.approx(si["default"], rel=1e-9), key


def test_the_default_of_a_link_is_shown_in_mib_and_microseconds() -> None:
    found = definitions(ClusterSpec)
    assert found["LinkLevel"]["properties"]["half_rate_mib"]["default"] == 1.5
    assert found["NetworkSpec"]["properties"]["half_rate_mib"]["default"] == 1.0
    assert found["NetworkSpec"]["properties"]["latency_us"]["default"] == 14.0


def test_the_schema_of_a_framework_offers_human_keys_for_absolute_sizes_only() -> None:
    found = definitions(Framework)
    keys = {key for group in GROUPS.values() for key in found[group.__name__]["properties"]}
    assert {"fixed_gib", "communicator_gib", "step_overhead_ms"} <= keys
    fields_in_gib = {key for key in keys if key.endswith("_gib")}
    assert fields_in_gib == {"fixed_gib", "communicator_gib", "bucket_gib", "reduce_bucket_gib"}


# -- writing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "text"), [("a.json", '{"a": 1}'), ("a.toml", "a = 1")])
def test_a_mark_before_the_text_is_passed_over(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert read_table(tmp_path / name) == {"a": 1}


def test_a_file_is_written_with_its_text_and_ordinary_permissions(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_text(path, "{}\r\n\u00e9\n")
    assert path.read_bytes() == "{}\r\n\u00e9\n".encode()
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    assert names(tmp_path) == ["plan.json"]


def test_a_script_is_written_executable(tmp_path: Path) -> None:
    write_text(tmp_path / "run.sh", "#!/bin/sh\n", executable=True)
    assert os.access(tmp_path / "run.sh", os.X_OK)


def test_an_existing_file_is_kept_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_text(path, "old")
    with pytest.raises(InputError, match="--force"):
        write_text(path, "new")
    assert path.read_text() == "old"
    write_text(path, "new", force=True)
    assert path.read_text() == "new"


def test_a_file_in_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        write_text(tmp_path / "no" / "plan.json", "{}")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that refuses even root")
def test_a_file_in_an_unwritable_folder_is_refused() -> None:
    with pytest.raises(InputError, match="cannot be written"):
        write_text(Path("/proc/self/plan.json"), "{}")


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="No space left on device"):
        write_text(path, "new", force=True)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["plan.json"]


def test_a_folder_is_not_overwritten_by_a_file(tmp_path: Path) -> None:
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(InputError):
        write_text(tmp_path / "plan.json", "{}", force=True)
    assert names(tmp_path) == ["plan.json"]


def test_a_name_that_the_file_system_refuses_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        write_text(tmp_path / ("x" * 300), "{}")


def test_text_that_cannot_be_encoded_is_an_input_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        write_text(tmp_path / "plan.json", "\ud800")
    assert names(tmp_path) == []


def test_a_pipe_is_refused_even_with_force(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    for target in (path, Path("/dev/null")):
        for force in (False, True):
            with pytest.raises(InputError, match="device, pipe or socket"):
                write_text(target, "{}", force=force)
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert names(tmp_path) == ["pipe"]


def test_a_home_folder_that_does_not_exist_is_an_input_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"~nobody-here/timings\.db: there is no such home folder"):
        of_user("~nobody-here/timings.db")

    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for name in ("HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError, match="this user has no home folder to keep autoplan's data in"):
        own_folder("data")


def test_a_link_keeps_pointing_to_the_file_that_is_written(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    target, link = tmp_path / "kept" / "plan.json", tmp_path / "plan.json"
    target.write_text("old")
    link.symlink_to(target)
    with pytest.raises(InputError, match="--force"):
        write_text(link, "new")
    write_text(link, "new", force=True)
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert names(tmp_path / "kept") == ["plan.json"]


def test_a_link_that_leads_nowhere_counts_as_existing(tmp_path: Path) -> None:
    target, link = tmp_path / "later.json", tmp_path / "plan.json"
    link.symlink_to(target)
    for refused in (write_text, lambda path, _: check_target(path, force=False)):
        with pytest.raises(InputError, match="--force"):
            refused(link, "new")
    write_text(link, "new", force=True)
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_links_in_a_loop_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for force in (False, True):
        with pytest.raises(InputError):
            write_text(tmp_path / "a", "{}", force=force)


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    write_folder(tmp_path / "deep" / "launch", {"launch.sh": ("echo\n", True), "plan.yaml": ("a: 1\n", False)})
    assert sorted(names(tmp_path / "deep" / "launch")) == ["launch.sh", "plan.yaml"]
    assert os.access(tmp_path / "deep" / "launch" / "launch.sh", os.X_OK)
    with pytest.raises(InputError, match="not Unicode"):
        write_folder(tmp_path / "half", {"launch.sh": ("echo\n", True), "plan.yaml": ("\ud800", False)})
    assert names(tmp_path) == ["deep"]


def test_what_else_is_in_a_folder_is_not_touched(tmp_path: Path) -> None:
    folder = tmp_path / "launch"
    folder.mkdir()
    (folder / "launch.sh").symlink_to("elsewhere")
    with (folder / "slurm-1.out").open("w") as log:  # of a job that runs
        inode = (folder / "slurm-1.out").stat().st_ino
        with pytest.raises(InputError, match="--force"):
            write_folder(folder, {"launch.sh": ("new\n", True)})
        write_folder(folder, {"launch.sh": ("new\n", True)}, force=True)
        log.write("step 2\n")
    assert (folder / "slurm-1.out").read_text() == "step 2\n"
    assert (folder / "slurm-1.out").stat().st_ino == inode
    assert not (folder / "launch.sh").is_symlink()
    assert (folder / "launch.sh").read_text() == "new\n"
    assert sorted(names(folder)) == ["launch.sh", "slurm-1.out"]
    assert names(tmp_path) == ["launch"]


def test_a_folder_may_be_the_current_one_or_a_link_to_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "link").symlink_to("scratch")
    write_folder(tmp_path / "link", {"launch.sh": ("new\n", True)})
    assert (tmp_path / "link").is_symlink()
    assert names(tmp_path / "scratch") == ["launch.sh"]
    monkeypatch.chdir(tmp_path)
    write_folder(Path(), {"launch.sh": ("new\n", True)}, force=True)
    assert sorted(names(tmp_path)) == ["launch.sh", "link", "scratch"]
    with pytest.raises(InputError, match="scratch is a folder"):
        write_folder(Path(), {"scratch": ("new\n", True)}, force=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    first_s: float
    second_bytes: float | None = None


def test_an_optional_quantity_may_be_left_out_and_is_scaled_when_given() -> None:
    assert decode(_Pair, {"first_ms": 2.0}, "x").second_bytes is None
    assert decode(_Pair, {"first_us": 2, "second_mib": 3}, "x") == _Pair(first_s=2e-6, second_bytes=3 * 2**20)


def test_a_quantity_too_large_for_a_float_in_its_unit_is_refused() -> None:
    refusal(DeviceSpec, {**{key: value for key, value in DEVICE.items() if "memory" not in key}, "memory_gib": 10**400})


def test_a_message_repeats_a_few_unknown_keys_each_cut() -> None:
    message = refusal(DeviceSpec, DEVICE | {f"{'k' * 5000}{number}": 1 for number in range(50)})
    assert "and 42 more" in message
    assert len(message) < 1500


def test_a_message_shows_the_first_of_many_faults_and_counts_the_others() -> None:
    levels = [{**CLUSTER["levels"][0], f"{'k' * 70}{at}": 1} for at in range(30)]
    message = refusal(ClusterSpec, {**CLUSTER, "levels": levels})
    assert re.search(r"; and \d+ faults more", message)
    assert len(message) < 1500


def test_a_message_lists_some_of_many_known_keys() -> None:
    with pytest.raises(InputError, match=r"unknown key 'zzz' and .*; known: .*, and \d+ more$") as refusal:
        decode(ModelSpec, {"zzz": 1}, "model.toml")
    assert len(str(refusal.value)) < 1000
