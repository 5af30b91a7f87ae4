"""Recipes of published tables: the framework that their runs are priced with, and what a blank cell means in them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from autoplan.base.files import decode, read_table
from autoplan.frameworks.presets import load_framework
from autoplan.spec.enums import CudaGraphs, Dispatcher, Precision, RecomputeModule, Sharding
from autoplan.spec.framework import Framework
from autoplan.spec.training import Attention

FIRST_FLASH_YEAR = 2023  # before that, published runs in three dimensions had kernels like Megatron-LM's


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Circumstances of the runs that a table calls by one of some names, where the table leaves them out."""

    names: tuple[str, ...]  # that a row's begins with, whatever the case
    years: tuple[str, ...] = ()  # that a row's begins with; none: of all years
    devices: tuple[str, ...] = ()  # with or without their memory; none: on all devices
    framework: str  # id of its facts
    uncompiled: str = (
        ""  # id of those without torch.compile, of which cuda_graph=none tells where nothing else captures
    )
    in_pipelines: str = ""  # id of those in pipelines, where other code runs them
    traits: Mapping[str, bool | int | float | str] = field(
        default_factory=dict
    )  # what their build of it did and no release does
    usual: tuple[str, ...] = ()  # options (AXIS=VALUE) of their plans, where a row does not say them
    # What another build of it did, from so many nodes on as often as not, and no column tells: an interval holds both.
    doubted: Mapping[str, int | float] = field(default_factory=dict)
    doubted_from_nodes: int = 1
    is_kin: bool = False  # they were made with another framework, which works like this one and was not measured
    attention: Attention = "flash"
    precision: Precision | None = None  # what its scripts train in, whatever a table says
    sharding: Sharding = Sharding.ZERO1
    interleaves_layers: bool = False  # dense models interleave chunks of one layer
    trains_mtp: bool = False  # the layers of multi-token prediction that a model has are trained
    latent_recompute: tuple[RecomputeModule, ...] = ()  # parts that layers with latent attention repeat, if any
    packed_document_len: int | None = None  # mean tokens of what is packed, where a row says that its data are
    microbatch_per_rank: bool = False  # pipelines take as many micro-batches as they have ranks
    counts_ends_as_layers: bool = False  # embedding and head count for a layer each; first stages take what is left
    relieves_last_stage: bool = False  # the last of 4 stages or more has fewer layers, the middle ones one more
    keeps_gpt_dropout: bool = False  # models of the shape of GPT are trained with dropout
    narrows_attention: tuple[Precision, ...] = ()  # precisions in which mixtures of experts attend in 8 bits
    overlaps_experts: tuple[Precision, ...] = ()  # precisions in which expert traffic is overlapped where it can be
    overlap_graphs: CudaGraphs = CudaGraphs.NONE  # what is launched as CUDA graphs where it is, in these precisions
    dispatcher: Dispatcher = Dispatcher.ALL_TO_ALL  # of tokens that are not dropped
    # Router and rotary embeddings of latent attention run op by op where tokens travel by plain all-to-all.
    routes_unfused_alltoall: bool = False
    overlaps_far_experts: bool = False  # likewise, in interleaved pipelines, what leaves the scale-up domain

    def software(self) -> Framework:
        """Return the framework as these runs had it."""
        framework = load_framework(self.framework).changed(**self.traits)
        return replace(framework, usual=framework.usual + self.usual)

    def fit(self, name: str, year: str, device: str) -> int:
        """Return how exactly the recipe names a row: the length of what agrees; 0 where something does not."""
        begun = max((len(prefix) for prefix in self.names if name.casefold().startswith(prefix.casefold())), default=0)
        eras = [era for era in self.years or ("",) if year.startswith(era)]
        kinds = [kind for kind in self.devices or ("",) if kind in ("", device, device.rpartition("-")[0])]
        if not begun or not eras or not kinds:
            return 0
        return begun + max(map(len, eras)) + max(map(len, kinds))


@dataclass(frozen=True, slots=True, kw_only=True)
class _RecipeFile:
    recipes: tuple[Recipe, ...]


@lru_cache(maxsize=1)
def recipes() -> tuple[Recipe, ...]:
    """Return the shipped recipes."""
    path = Path(__file__).with_suffix(".toml")
    table = read_table(path)
    groups = table.pop("groups")
    table["recipes"] = [_in_groups(recipe, groups) for recipe in table["recipes"]]
    return decode(_RecipeFile, table, path.name).recipes


def _in_groups(recipe: dict[str, Any], groups: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a recipe with what its groups have in common, traits one by one; what it says itself counts."""
    tables = [*(groups[name] for name in recipe.get("groups", ())), recipe]
    merged = {key: value for table in tables for key, value in table.items() if key != "groups"}
    if traits := {name: value for table in tables for name, value in table.get("traits", {}).items()}:
        merged["traits"] = traits
    return merged


def recipe_called(name: str, year: str, device: str = "") -> Recipe | None:
    """Return the recipe of the runs that a table calls `name`; None where there is none.

    A colon stands before what was run of a group of versions: "NeMo 24.07 or older: NeMo 23.04".  Where no recipe
    begins the name, one that begins one of its later words is kin: "Trainer of ours on FSDP".
    """
    name = name.rpartition(": ")[2]
    words = [name, *(name[match.start() :] for match in re.finditer(r"\b\w", name) if match.start())]
    for at, text in enumerate(words):
        best = max(recipes(), key=lambda recipe: recipe.fit(text, year, device))
        if best.fit(text, year, device):
            return replace(best, is_kin=True) if at else best
    return None


def nearest_recipe(sharding: str, year: str) -> Recipe:
    """Return the recipe of runs of which no framework is known: by their sharding, else by their year."""
    if sharding.startswith(Sharding.ZERO3):
        return Recipe(names=(), framework="pytorch-fsdp", in_pipelines="torchtitan", is_kin=True)
    is_old = year.isdecimal() and int(year) < FIRST_FLASH_YEAR
    return Recipe(
        names=(), framework="megatron-lm-2021" if is_old else "eager", is_kin=True, keeps_gpt_dropout=not is_old
    )
