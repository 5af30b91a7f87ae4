from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.base.errors import InputError
from autoplan.profiler.group_layouts import Layout, groups_of, layouts


def layout(num_devices: int, devices_per_node: int, num_groups: int) -> Layout:
    return Layout(num_devices=num_devices, devices_per_node=devices_per_node, num_groups=num_groups)


def test_a_node_of_eight_has_pairs_fours_and_the_whole() -> None:
    assert layouts(1, 8) == [layout(2, 2, 1), layout(2, 2, 4), layout(4, 4, 1), layout(4, 4, 2), layout(8, 8, 1)]


def test_nodes_are_joined_by_one_device_each_and_by_all() -> None:
    assert layouts(4, 2) == [layout(2, 2, 1), layout(4, 1, 1), layout(4, 1, 2), layout(8, 2, 1)]
    assert layouts(3, 1) == [layout(3, 1, 1)]
    assert layouts(1, 1) == []


def test_six_devices_of_a_node_are_measured_together_too() -> None:
    assert layout(6, 6, 1) in layouts(1, 6)


def test_groups_hold_neighbours_of_a_node_and_the_same_places_of_others() -> None:
    assert groups_of(layout(2, 2, 2), 2, 4) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups_of(layout(2, 2, 1), 2, 4) == [[0, 1], [4, 5]]  # whatever one node does, the others do too
    assert groups_of(layout(2, 1, 4), 2, 4) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert groups_of(layout(4, 2, 2), 2, 4) == [[0, 2, 4, 6], [1, 3, 5, 7]]  # at strides, as data parallelism is
    assert groups_of(layout(2, 1, 1), 2, 4) == [[0, 4]]


@given(st.integers(1, 6), st.integers(1, 16))
def test_siblings_share_out_the_devices(num_nodes: int, devices_per_node: int) -> None:
    for layout in layouts(num_nodes, devices_per_node):
        groups = groups_of(layout, num_nodes, devices_per_node)
        num_places = num_nodes * layout.devices_per_node // layout.num_devices  # sets of nodes that a group touches
        assert len(groups) == layout.num_groups * num_places
        assert all(len(group) == layout.num_devices for group in groups)
        ranks = [rank for group in groups for rank in group]
        assert len(set(ranks)) == len(ranks)
        assert 0 in ranks  # which decides and reports
        for group in groups:
            here = [rank for rank in group if rank // devices_per_node == group[0] // devices_per_node]
            assert len(here) == layout.devices_per_node


@pytest.mark.parametrize("wrong", [layout(4, 3, 1), layout(3, 3, 1), layout(8, 2, 1), layout(2, 2, 9)])
def test_groups_that_do_not_fit_are_refused(wrong: Layout) -> None:
    with pytest.raises(InputError, match=r"groups (of|with)"):
        groups_of(wrong, 2, 4)
