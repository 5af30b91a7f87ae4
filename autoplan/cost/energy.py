"""Power of training: devices by activity, and their hosts (`modelling` F)."""

from __future__ import annotations

from collections.abc import Mapping

from autoplan.base.arrays import Floats, add_up
from autoplan.base.errors import InputError
from autoplan.spec.terms import COMPONENTS
from autoplan.topology.cluster import ClusterSpec
from autoplan.topology.mixed_cluster import MixedCluster

# Shares of the range between idle power and the TDP, in the middle of the ranges in `modelling` F: .75-.95 while a
# device computes, .5-.65 while it communicates or polls for messages.  Judged; a node of 8 H100 then draws 7.3 kW while
# it computes, where 7.8 kW (arXiv:2506.14551) and at most 8.4 kW (arXiv:2412.08602) were measured.
COMPUTING_SHARE, WAITING_SHARE = 0.85, 0.575
IDLE_SHARE = 0.1  # of the TDP; judged


def device_power_w(tdp_w: float, share: float) -> float:
    """Power of a device at `share` of the range from idle to its TDP."""
    return tdp_w * (IDLE_SHARE + share * (1.0 - IDLE_SHARE))


def waiting_power_w(cluster: ClusterSpec | MixedCluster) -> float:
    """Power of all nodes while no device computes: the lower bound for any step of a job."""
    power_w = 0.0
    for part in cluster.parts:
        if part.host.power_w is None:
            raise InputError(
                f"the energy of {part.name} needs power_w, the power of a node without its devices: give it in [host] "
                "of the cluster file"
            )
        power_w += part.num_nodes * part.host.power_w
        power_w += part.num_devices * device_power_w(part.device.tdp_w, WAITING_SHARE)
    return power_w


def step_energy_j(cluster: ClusterSpec | MixedCluster, terms_s: Mapping[str, Floats], step_s: Floats) -> Floats:
    """Energy of every plan's step over all nodes, assuming that all devices compute as long as the busiest stage."""
    extra_w = sum(
        part.num_devices * (device_power_w(tdp_w, COMPUTING_SHARE) - device_power_w(tdp_w, WAITING_SHARE))
        for part in cluster.parts
        for tdp_w in [part.device.tdp_w]
    )
    computing_s = add_up(terms_s[name] for name in COMPONENTS["kernels"])
    return waiting_power_w(cluster) * step_s + extra_w * computing_s
