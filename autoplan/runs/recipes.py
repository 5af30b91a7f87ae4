"""Recipes of published tables: the framework to price their runs with, and the meaning of blank cells."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from autoplan.base.files import decode, read_table
from autoplan.frameworks.presets import load_framework
from autoplan.spec.enums import AttentionKernel, CudaGraphs, Dispatcher, Precision, RecomputeModule, Sharding
from autoplan.spec.framework import Framework

NEVER = 10**9  # nodes, or ranks of a tensor group
FIRST_FLASH_YEAR = 2023  # earlier published runs with 3D parallelism had kernels like Megatron-LM's


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Circumstances of runs with certain framework names in a table, for values that the table omits."""

    names: tuple[str, ...]  # prefixes of a row's framework name, case-insensitive
    years: tuple[str, ...] = ()  # prefixes of a row's year; empty: all years
    devices: tuple[str, ...] = ()  # with or without their memory; empty: all devices
    framework: str  # id of its facts
    uncompiled: str = (
        ""  # id for runs without torch.compile, recognised by cuda_graph=none if nothing else captures graphs
    )
    in_pipelines: str = ""  # id for runs with pipelines, if different code runs them
    backends: Mapping[str, str] = field(default_factory=dict)  # ids for runs whose framework names one of these words
    traits: Mapping[str, bool | int | float | str] = field(
        default_factory=dict
    )  # behaviour of their build that no release has
    usual: tuple[str, ...] = ()  # options (AXIS=VALUE) of their plans unless stated in a row
    # Behaviour of another build.  From `doubted_from_nodes` on about half of the runs had it, no column tells which,
    # and their interval covers both; all runs had it from `undoubted_from_nodes`, or `undoubted_from_tp`, on.
    doubted: Mapping[str, int | float] = field(default_factory=dict)
    doubted_from_nodes: int = 1
    undoubted_from_nodes: int = NEVER
    undoubted_from_tp: int = NEVER
    is_similar: bool = False  # they were made with another framework, which works like this one and was not measured
    had_other_rules: bool = False  # they were made with a version that allowed plans that the current one refuses
    attention: AttentionKernel = AttentionKernel.FLASH
    latent_attention: AttentionKernel = AttentionKernel.FLASH  # of models with latent attention
    precision: Precision | None = None  # precision of its scripts, whatever a table says
    sharding: Sharding = Sharding.ZERO1
    interleaves_layers: bool = False  # dense models interleave chunks of one layer
    trains_mtp: bool = False  # a model's multi-token prediction layers are trained
    latent_recompute: tuple[RecomputeModule, ...] = ()  # parts recomputed in layers with latent attention, if any
    packed_document_len: int | None = None  # mean tokens per packed document, if a row states packing
    microbatch_per_rank: bool = False  # pipelines have as many micro-batches as ranks
    counts_ends_as_layers: bool = False  # embedding and head count as a layer each; first stages take the rest
    relieves_last_stage: bool = False  # the last of at least 4 stages has fewer layers, the middle ones one more
    keeps_gpt_dropout: bool = False  # models of the shape of GPT are trained with dropout
    accumulates_in_pipelines: bool = False  # products add up gradients of weights only if there is a pipeline
    narrows_attention: tuple[Precision, ...] = ()  # precisions in which MoE models run attention in 8 bits
    wide_params: tuple[Precision, ...] = ()  # precisions in which weights keep 16 bits
    overlaps_experts: tuple[Precision, ...] = ()  # precisions in which expert traffic is overlapped if possible
    overlap_graphs: CudaGraphs = CudaGraphs.NONE  # CUDA graphs of runs with overlapped experts
    dispatcher: Dispatcher = Dispatcher.ALL_TO_ALL  # for dropless routing
    # Router and rotary embeddings of latent attention are unfused with a plain all-to-all dispatcher.
    routes_unfused_alltoall: bool = False
    overlaps_far_experts: bool = False  # the same for experts beyond the scale-up domain in interleaved pipelines

    def with_backend(self, name: str) -> Recipe:
        """Return the recipe with the framework of the backend that a row's framework names: "ms-swift (Megatron)"."""
        named = (framework for word, framework in self.backends.items() if word.casefold() in name.casefold())
        return replace(self, framework=next(named, self.framework))

    def software(self) -> Framework:
        """Return the framework of these runs."""
        framework = load_framework(self.framework).changed(**self.traits)
        return replace(framework, usual=framework.usual + self.usual)

    def builds(self, framework: Framework, num_nodes: int, tp: int) -> tuple[Framework, Framework | None]:
        """Return the framework of a run of such a size, and the other one that it may have used; None: no doubt."""
        if not self.doubted:
            return framework, None
        other = framework.changed(**self.doubted)
        if num_nodes >= self.undoubted_from_nodes or tp >= self.undoubted_from_tp:
            return other, None
        return framework, other if num_nodes >= self.doubted_from_nodes else None

    def fit(self, name: str, year: str, device: str) -> int:
        """Return how specifically the recipe matches a row: the length of the matching texts, 0 for a mismatch."""
        begun = max((len(prefix) for prefix in self.names if _plain(name).startswith(_plain(prefix))), default=0)
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
    """Return a recipe merged with the defaults of its groups, trait by trait; its own values take precedence."""
    tables = [*(groups[name] for name in recipe.get("groups", ())), recipe]
    merged = {key: value for table in tables for key, value in table.items() if key != "groups"}
    if traits := {name: value for table in tables for name, value in table.get("traits", {}).items()}:
        merged["traits"] = traits
    return merged


def recipe_called(name: str, year: str, device: str = "") -> Recipe | None:
    """Return the recipe of the runs called `name` in a table; None if there is none.

    A colon precedes the actual version of a group of versions: "NeMo 24.07 or older: NeMo 23.04".  If no recipe is a
    prefix of the name, one that is a prefix of a later word is used as a similar framework: "Trainer of ours on FSDP".
    """
    name = name.rpartition(": ")[2]
    words = [name, *(name[match.start() :] for match in re.finditer(r"\b\w", name) if match.start())]
    for at, text in enumerate(words):
        best = max(recipes(), key=lambda recipe: recipe.fit(text, year, device))
        if best.fit(text, year, device):
            best = best.with_backend(text)
            return replace(best, is_similar=True) if at else best
    return None


def _plain(name: str) -> str:
    """Return the name without case, and with blanks for dashes: "Megatron LM" is Megatron-LM."""
    return re.sub("[-_]", " ", name.casefold())


def nearest_recipe(sharding: str, year: str) -> Recipe:
    """Return the recipe of runs with an unknown framework, by their sharding or else by their year."""
    if sharding.startswith(Sharding.ZERO3):
        return Recipe(names=(), framework="pytorch-fsdp", in_pipelines="torchtitan-0.2", is_similar=True)
    is_old = year.isdecimal() and int(year) < FIRST_FLASH_YEAR
    return Recipe(
        names=(), framework="megatron-lm-2021" if is_old else "eager", is_similar=True, keeps_gpt_dropout=not is_old
    )
