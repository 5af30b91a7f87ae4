"""Does the module exported for PyTorch FSDP2 shard a real model as planned, and are its settings read back?"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autoplan.base.errors import InputError
from autoplan.frameworks.common.launch import LaunchContext
from autoplan.frameworks.fsdp2.read import read, recognises
from autoplan.launch.targets import job_of
from autoplan.spec.framework import Framework
from autoplan.spec.plan import ParallelPlan, chunk_layers
from autoplan.spec.plan_file import PlanFile
from damage import damaged
from test_megatron_lm_export import LLAMA_8B, plan_file_of

FSDP = Framework(name="pytorch-fsdp", rules="fsdp2").changed(bytes_per_reduced_grad=2.0)
MODEL = replace(LLAMA_8B, num_layers=12)
RUNS = Path(__file__).parent / "support" / "fsdp2_runs.py"


def fsdp(**plan: Any) -> PlanFile:
    """Like the plans of a search, one that spells out its layers where they are not even."""
    counts = chunk_layers(ParallelPlan(**{"global_batch": 256, **plan}), MODEL.num_layers)
    plan["layers_per_chunk"] = counts if len(set(counts)) > 1 else None
    return replace(plan_file_of(MODEL, **{"sharding": "zero3", **plan}), framework=FSDP)


def files_of(plan_file: PlanFile) -> dict[str, str]:
    return {file.name: file.text for file in job_of(plan_file, "fsdp2").files}


def assert_read_back(plan_file: PlanFile) -> None:
    text = files_of(plan_file)["fsdp2.json"]
    assert recognises("fsdp2.json", text)
    launch = read(text, LaunchContext(model=plan_file.model))
    assert (launch.training, launch.plan, launch.unread) == (plan_file.training, plan_file.best.plan, ())


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(
        (("1f1b", 1), ("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("interleaved", 2), ("zb-v", 2), ("dualpipe-v", 2))
    ),
    st.sampled_from((2, 4, 5)),
    st.sampled_from((1, 2, 4)),
    st.sampled_from((1, 2, 4)),
    st.sampled_from(((1, 1), (4, 1), (2, 3))),
    st.sampled_from(("none", "zero2", "zero3")),
    st.sampled_from(("none", "full", "some")),
    st.sampled_from(("bf16", "fp16")),
    st.booleans(),
    st.integers(1, 5),
)
def test_whatever_it_runs_is_read_back(
    schedule: tuple[Any, int],
    pp: int,
    tp: int,
    cp: int,
    data: tuple[int, int],
    sharding: Any,
    recompute: str,
    precision: str,
    sp: bool,
    steps: int,
) -> None:
    shard, replicate = (data[0] * data[1], 1) if sharding == "none" else data
    pp = 1 if schedule == ("1f1b", 1) and sp else pp
    try:
        plan_file = fsdp(
            pp=pp,
            vp=schedule[1],
            schedule=schedule[0],
            tp=tp,
            sp=sp and tp > 1,
            cp=cp,
            dp_shard=shard,
            dp_replicate=replicate,
            sharding=sharding,
            recompute="none" if recompute == "none" else "full",
            recompute_num_layers=3 if recompute == "some" else None,
            precision=precision,
            micro_batch=2,
            global_batch=2 * steps * pp * shard * replicate,
        )
        files_of(plan_file)
    except InputError:
        assume(False)
    assert_read_back(plan_file)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "narrow": ({"dp_shard": 8, "precision": "fp8"}, "precision 'fp8'"),
    "selective": ({"dp_shard": 8, "recompute": "selective"}, "recompute 'selective': which"),
    "another order": ({"pp": 2, "dp_shard": 4, "rank_order": "tp-cp-ep-pp-dp"}, "numbers stages last"),
    "overlap": ({"tp": 2, "tp_overlap": True}, "tp_overlap: leave it out"),
    "a broken rule": ({"dp_shard": 8, "sharding": "zero1"}, "use 'none' or 'zero2' or 'zero3'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_expressed_is_refused_in_one_line(case: str) -> None:
    plan, says = REFUSED[case]
    with pytest.raises(InputError) as error:
        files_of(fsdp(**plan))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "devices": ({"world_size": 9}, "the mesh needs 8 devices, there are 9"),
    "shards": ({"fully_shard": {"shard_over": ["tp"], "param_dtype": "bfloat16"}}, "shard_over must be"),
    "a type": ({"fully_shard": {"shard_over": [], "param_dtype": "int8"}}, "must be bfloat16 or float16"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_read_is_said_in_one_line(case: str) -> None:
    change, says = WRONG[case]
    text = json.dumps(json.loads(files_of(fsdp(dp_shard=8))["fsdp2.json"]) | change)
    with pytest.raises(InputError) as error:
        read(text, LaunchContext(model=MODEL))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@settings(max_examples=80, deadline=None)
@given(
    damaged(
        [files_of(fsdp(dp_shard=8))["fsdp2.json"], files_of(fsdp(pp=2, vp=3, schedule="interleaved"))["fsdp2.json"]]
    )
)
def test_a_damaged_file_is_read_or_refused(text: str) -> None:
    with suppress(InputError):
        assert read(text, LaunchContext(model=MODEL)).plan.num_devices >= 1


# -- PyTorch itself ---------------------------------------------------------------------------------------------------

# Plan, rank: the stages and layers of it, how the first weight of 8 x 8 is placed there, how many layers recompute.
CASES: dict[str, tuple[PlanFile, int, dict[str, Any]]] = {
    "sharded": (fsdp(dp_shard=8), 3, {"local": [1, 8], "checkpointed": 0, "sharded": 13}),
    "copies": (fsdp(dp_shard=8, sharding="none", recompute="full"), 3, {"local": [8, 8], "checkpointed": 12}),
    "in copies": (
        fsdp(dp_shard=4, dp_replicate=2, recompute="full", recompute_num_layers=5),
        7,
        {"local": [2, 8], "checkpointed": 5, "mesh": {"pp": 1, "copies": 2, "shards": 4, "tp": 1}},
    ),
    "tensors": (fsdp(tp=2, dp_shard=2), 1, {"local": [2, 8], "mesh": {"pp": 1, "copies": 1, "shards": 2, "tp": 2}}),
    "context": (fsdp(cp=2, dp_shard=2, tp=2), 6, {"local": [1, 8], "cp": [4, 6]}),
    "uneven": (
        fsdp(pp=3, dp_shard=2, layers_per_chunk=(5, 4, 3)),
        2,
        {"stages": [[1, 5, 9]], "schedule": "Schedule1F1B", "sharded": 5},
    ),
    "interleaved": (
        fsdp(pp=2, vp=3, schedule="interleaved"),
        1,
        {"stages": [[1, 2, 4], [3, 6, 8], [5, 10, 12]], "schedule": "ScheduleInterleaved1F1B"},
    ),
    "zb-v": (fsdp(pp=2, vp=2, schedule="zb-v"), 0, {"stages": [[0, 0, 3], [3, 9, 12]]}),
    "zb-h1": (fsdp(pp=4, schedule="zb-h1"), 3, {"schedule": "ScheduleInterleavedZeroBubble"}),
}


def answer_to(question: Any) -> Any:
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(RUNS)],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_a_model_is_sharded_as_planned() -> None:
    asked = [{"files": files_of(case), "layers": MODEL.num_layers, "rank": rank} for case, rank, _ in CASES.values()]
    for name, answer in zip(CASES, answer_to(asked), strict=True):
        expected = CASES[name][2]
        assert "error" not in answer, (name, answer["error"])
        assert {key: answer[key] for key in expected} == expected, name


def test_two_processes_find_the_gradients_of_one() -> None:
    answers = answer_to({"files": files_of(fsdp(dp_shard=2, recompute="full"))})
    assert len(answers) == 2
    for answer in answers:
        assert answer["parameters"] == 10
        assert answer["worst"] < 1e-6
