"""Shipped devices for the names of devices in drivers and logs."""

from __future__ import annotations

import re

_NAMES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"(NVIDIA |Tesla )?V100-SXM[23]-32GB.*", ("v100",)),
    (r"(NVIDIA |Tesla )?V100-PCIE-32GB", ("v100-pcie",)),
    (r"(NVIDIA )?A100-SXM4?-80GB", ("a100-sxm",)),
    (r"(NVIDIA )?A100-SXM4?-40GB", ("a100-sxm-40",)),
    (r"(NVIDIA )?A100-SXM4?-64GB", ("a100-sxm-64",)),
    (r"(NVIDIA )?A100-SXM.*", ("a100-sxm", "a100-sxm-40")),
    (r"(NVIDIA )?A100(-PCIE-80GB| 80GB PCIe).*", ("a100-pcie",)),
    (r"(NVIDIA )?A800-SXM.*", ("a800-sxm",)),
    (r"NVIDIA L40S", ("l40s",)),
    (r"NVIDIA L40", ("l40",)),
    (r"NVIDIA L4", ("l4",)),
    (r"NVIDIA A10", ("a10",)),
    (r"NVIDIA A10G", ("a10g",)),
    (r"NVIDIA A30", ("a30",)),
    (r"NVIDIA A40", ("a40",)),
    (r"NVIDIA RTX A6000", ("a6000",)),
    (r"NVIDIA RTX 6000 Ada Generation", ("rtx-6000-ada",)),
    (r"NVIDIA RTX PRO 6000 Blackwell.*", ("rtx-pro-6000",)),
    (r"NVIDIA GeForce RTX 3090", ("rtx-3090",)),
    (r"NVIDIA GeForce RTX 4090", ("rtx-4090",)),
    (r"NVIDIA GeForce RTX 5090", ("rtx-5090",)),
    (r"(NVIDIA )?(Tesla )?T4", ("t4",)),
    (r"NVIDIA H100 80GB HBM3", ("h100-sxm",)),
    (r"NVIDIA H100 PCIe", ("h100-pcie",)),
    (r"NVIDIA H100 NVL", ("h100-nvl",)),
    (r"NVIDIA H800", ("h800",)),
    (r"NVIDIA H20", ("h20",)),
    (r"NVIDIA H200", ("h200-sxm",)),
    (r"NVIDIA H200 NVL", ("h200-nvl",)),
    (r"NVIDIA GH200.*", ("gh200",)),
    (r"NVIDIA B200\b.*", ("b200",)),
    (r"NVIDIA B300\b.*", ("b300",)),
    (r"NVIDIA GB200\b.*", ("gb200",)),
    (r"NVIDIA GB300\b.*", ("gb300",)),
    (r"AMD Instinct MI210\b.*", ("mi210",)),
    (r"AMD Instinct MI250X?\b.*", ("mi250x-gcd",)),
    (r"AMD Instinct MI300A\b.*", ("mi300a",)),
    (r"AMD Instinct MI300X\b.*", ("mi300x",)),
    (r"AMD Instinct MI325X\b.*", ("mi325x",)),
    (r"AMD Instinct MI350X\b.*", ("mi350x",)),
    (r"AMD Instinct MI355X\b.*", ("mi355x",)),
)


def devices_named(name: str) -> tuple[str, ...]:
    """Return autoplan's ids of the devices that `name` may mean; empty if no such device is shipped."""
    return next((ids for pattern, ids in _NAMES if re.fullmatch(pattern, name.strip())), ())


def device_named(name: str) -> str:
    """Return autoplan's id of the device `name`; `name` itself if none is shipped or the name is ambiguous."""
    ids = devices_named(name)
    return ids[0] if len(ids) == 1 else name.strip()
