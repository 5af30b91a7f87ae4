"""Gain from ordering the nodes of a fragmented allocation.

usage: python benchmarks/placement.py [--seeds N]

A fat tree of 8 leaves of 16 nodes of 8 H100, 40 % of whose nodes are taken at random, as in He et al. (Arnold,
arXiv:2509.15940); a job takes 64 of the rest, those of the emptiest leaves.  Steps of GPT-3 175B with tp 8, pp 8, dp 8
are priced with the nodes in random order, packed leaf by leaf, and as the search orders them, with leaves
oversubscribed 4:1 and not at all; and how many leaves the widest pipeline or data-parallel group spans.
"""

from __future__ import annotations

import argparse
from statistics import geometric_mean

from allocations import BIG, fat_tree, packed, problem_on, shuffled, step_s, widest

from autoplan.search.placement import best_placement


def placement(seeds: int) -> None:
    """Print the gain for every seed, and its mean."""
    print("taper  seed  random s  packed s  placed s  gain over random  over packed  leaves of the widest group")
    for taper in (4.0, 1.0):
        gains = []
        for seed in range(seeds):
            leaves = packed(seed)
            orders = (leaves, shuffled(leaves, seed))
            in_order, at_random = (problem_on(fat_tree(order, taper=taper)) for order in orders)
            placed = best_placement(at_random, BIG)
            times = step_s(at_random, BIG), step_s(in_order, BIG), step_s(at_random, placed)
            gains.append((times[0] / times[2], times[1] / times[2]))
            spans = widest(at_random, BIG), widest(in_order, BIG), widest(at_random, placed)
            print(
                f"{taper:5.0f}  {seed:4d}  {times[0]:8.3f}  {times[1]:8.3f}  {times[2]:8.3f}  {gains[-1][0]:15.3f}x"
                f"  {gains[-1][1]:10.3f}x  {spans[0]} random, {spans[1]} packed, {spans[2]} placed"
            )
        means = [geometric_mean(column) for column in zip(*gains, strict=True)]
        print(f"{taper:5.0f}  mean{'':30}  {means[0]:15.3f}x  {means[1]:10.3f}x")


def main() -> None:
    """Print all sections."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=20)
    placement(parser.parse_args().seeds)


if __name__ == "__main__":
    main()
