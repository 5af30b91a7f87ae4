"""Which shipped devices may the name mean that a driver, or a log, gives to a device?"""

from __future__ import annotations

import re

_NAMES: tuple[tuple[str, str], ...] = (
    (r"(NVIDIA |Tesla )?V100-SXM[23]-32GB.*", "v100"),
    (r"(NVIDIA )?A100-SXM4?-80GB", "a100-sxm"),
    (r"(NVIDIA )?A100-SXM4?-40GB", "a100-sxm-40"),
    (r"(NVIDIA )?A100(-PCIE-80GB| 80GB PCIe)", "a100-pcie"),
    (r"(NVIDIA )?A800-SXM.*", "a800-sxm"),
    (r"NVIDIA L40S", "l40s"),
    (r"NVIDIA H100 80GB HBM3", "h100-sxm"),
    (r"NVIDIA H100 PCIe", "h100-pcie"),
    (r"NVIDIA H800", "h800"),
    (r"NVIDIA H200", "h200-sxm"),
    (r"NVIDIA (GH200|B200|B300|GB200|GB300)\b.*", r"\1"),
    (r"AMD Instinct (MI300X|MI325X|MI355X)\b.*", r"\1"),
    (r"AMD Instinct MI250X?\b.*", "mi250x-gcd"),
)


def device_named(name: str) -> str:
    """autoplan's id of the device called `name`; `name` itself where none is shipped."""
    for pattern, known in _NAMES:
        if match := re.fullmatch(pattern, name.strip()):
            return match.expand(known).lower()
    return name.strip()
