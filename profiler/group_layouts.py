"""Layouts of the device groups that a job on several nodes can form.

The shape of a collective is (num_devices, devices_per_domain, num_groups, buffer_bytes), as in `SHAPES`; a node here
means a scale-up domain, which may be several nodes.  Groups that work at the same time are siblings: they have the same
layout on the other devices of the same nodes; all other nodes do the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.base.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Groups of `num_devices`, with `devices_per_node` on each node of a group."""

    num_devices: int
    devices_per_node: int
    num_groups: int  # working on the same nodes

    def shape(self, buffer_bytes: int) -> tuple[int, ...]:
        """Return the shape of a collective with this buffer."""
        return (self.num_devices, self.devices_per_node, self.num_groups, buffer_bytes)


def layouts(num_nodes: int, devices_per_node: int) -> list[Layout]:
    """Return groups of 2, 4, 8 ... in a node, with one device per node, and of all; alone and with all siblings."""
    group_layouts = []
    sizes = [size for size in (2**power for power in range(1, 11)) if devices_per_node % size == 0]
    if devices_per_node > 1 and devices_per_node not in sizes:
        sizes.append(devices_per_node)
    for size in sizes:
        siblings = sorted({1, devices_per_node // size})
        group_layouts += [Layout(num_devices=size, devices_per_node=size, num_groups=at) for at in siblings]
    if num_nodes > 1:
        siblings = sorted({1, devices_per_node})
        group_layouts += [Layout(num_devices=num_nodes, devices_per_node=1, num_groups=at) for at in siblings]
        everyone = num_nodes * devices_per_node
        if devices_per_node > 1:
            group_layouts.append(Layout(num_devices=everyone, devices_per_node=devices_per_node, num_groups=1))
    return group_layouts


def groups_of(layout: Layout, num_nodes: int, devices_per_node: int) -> list[list[int]]:
    """Return the ranks of each group of `layout`, with ranks numbered node by node.

    Inside a node a group consists of neighbours, as in tensor parallelism; over several nodes it has the same positions
    on each, with a stride equal to the number of groups, as in data parallelism.
    """
    on_node = layout.devices_per_node
    nodes, remainder = divmod(layout.num_devices, on_node)
    if remainder or devices_per_node % on_node or num_nodes % nodes:
        raise InputError(
            f"groups of {layout.num_devices} with {on_node} on each node do not fit on {num_nodes} nodes of "
            f"{devices_per_node}: choose divisors"
        )
    if layout.num_groups > devices_per_node // on_node:
        raise InputError(
            f"{layout.num_groups} groups with {on_node} devices on each node need more than its {devices_per_node}"
        )
    return [
        [
            node * devices_per_node + device
            for node in range(first, first + nodes)
            for device in _places(neighbour, on_node, devices_per_node, is_strided=nodes > 1)
        ]
        for first in range(0, num_nodes, nodes)
        for neighbour in range(layout.num_groups)
    ]


def _places(group: int, on_node: int, devices_per_node: int, *, is_strided: bool) -> range:
    """Return the positions on a node of the members of one of its groups."""
    stride = devices_per_node // on_node
    return range(group, devices_per_node, stride) if is_strided else range(group * on_node, (group + 1) * on_node)
