"""Does FlagScale get a pipeline over different devices as the process meshes of the plan?"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

import autoplan
from autoplan.api.plan_files import make_mixed_file
from autoplan.api.results import MixedPlanResult
from autoplan.base.errors import InputError
from autoplan.cost.mixed.estimate import estimate_mixed
from autoplan.readers.cluster import load_cluster
from autoplan.readers.model import load_model
from autoplan.spec.mixed_problem import MixedPlan
from autoplan.spec.model import ModelSpec
from framework_parsers import ask
from launched import launched
from mixed_cases import SMALL, plan_of, problem_of, replicas

PARTS = load_cluster("h100-sxm:1x8"), load_cluster("a100-sxm:2x8")
# 16 A100 hold the first stage with tp 4, 8 H100 two more with tp 1 each.
UNEVEN = plan_of(kinds=(replicas(4, 8, (1, 4, 5), (0, 1, 3), (0, 1, 4)),))


def words_of(folder: Path, plan: MixedPlan, model: ModelSpec = SMALL) -> list[str]:
    """The arguments with which torchrun starts FlagScale's program."""
    problem = problem_of(*PARTS, model=model)
    file = make_mixed_file(problem, estimate_mixed(problem, [plan]), None, command="a test")
    files = autoplan.export(MixedPlanResult(file=file, problem=problem), to="megatron-lm@flagscale").files
    assert "on 24 x a100-sxm and h100-sxm" in files[0].text
    place = {"FLAGSCALE_DIR": "/opt/flagscale", "PYTHONPATH": "/opt", "MASTER_ADDR": "node0", "NODE_RANK": "0"}
    words = launched(folder, files, **place)
    return words[words.index("/opt/flagscale/flagscale/train/train_gpt.py") + 1 :]


def values(words: list[str], option: str) -> list[str]:
    after = words[words.index(option) + 1 :]
    return after[: next((at for at, word in enumerate(after) if word.startswith("--")), len(after))]


def test_stages_of_a_part_and_a_degree_are_a_process_mesh(tmp_path: Path) -> None:
    words = words_of(tmp_path, UNEVEN)
    assert values(words, "--hetero-process-meshes") == [*"41141", *"11142"]  # tp, cp, ep, dp, pp
    assert values(words, "--hetero-pipeline-layer-split") == ["5", "3", "4"]
    assert values(words, "--pipeline-model-parallel-size") == ["3"]
    assert len(values(words, "--hetero-device-types")) == 2
    assert "--pipeline-model-parallel-layout" not in words


def test_a_shared_embedding_needs_one_degree_at_both_ends(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="one tp for the first and the last stage of small"):
        words_of(tmp_path, UNEVEN, replace(SMALL, tied_embeddings=True))


def test_a_search_for_flagscale_may_have_unlike_degrees_which_megatron_lm_refuses() -> None:
    place = {"cluster": "h100-sxm:1x4+a100-sxm:1x4", "global_batch": 16, "seq_len": 2048}
    fixed = {"fix": ["cp=1", "recompute=none"], "forbid": ["tp_overlap"]}
    either, same = (
        autoplan.search_mixed("qwen2.5-0.5b", to=to, **place, **fixed)
        for to in ("megatron-lm@flagscale", "megatron-lm")
    )
    assert either.best.step_s <= same.best.step_s * (1 + 1e-9)
    assert all(len({cost.plan.layers_per_chunk(kind) for kind in cost.plan.kinds}) == 1 for cost in either.plans)
    assert autoplan.export(either, to="megatron-lm@flagscale").files


@pytest.mark.parametrize("model", [SMALL, replace(load_model("mixtral-8x7b"), num_layers=12)], ids=["dense", "experts"])
def test_flagscale_takes_the_meshes(tmp_path: Path, model: ModelSpec) -> None:
    if not os.environ.get("FLAGSCALE_DIR") or not os.environ.get("MEGATRON_LM_DIR"):
        pytest.skip("needs checkouts: FLAGSCALE_DIR, MEGATRON_LM_DIR")
    plan = replace(UNEVEN, common=replace(UNEVEN.common, ep=2)) if model.moe else UNEVEN
    (found,) = ask("megatron_parser.py", [{"world": 24, "words": words_of(tmp_path, plan, model)}], "flagscale")
    assert found.get("error") is None
    assert found["layers"] == [5, 3, 4]
    assert found["meshes"] == [[4, 1, plan.common.ep, 4, 1], [1, 1, plan.common.ep, 4, 2]]
    assert found["ranks"] == [[4, 4, 1]] * 16 + [[1, 4, 1]] * 8


SETTINGS = """
system:
  no_shared_fs: true
  tensor_model_parallel_size: 4
  sequence_parallel: true
  use_distributed_optimizer: false
  precision: {bf16: true}
model:
  num_layers: 4
  hidden_size: 1024
  num_attention_heads: 8
  swiglu: true
  seq_length: 2048
  max_position_embeddings: 2048
  micro_batch_size: 1
  global_batch_size: 16
  attention_backend: flash
  optimizer: {lr_scheduler: {lr: 1.0e-4}}
data:
  tokenizer: {tokenizer_type: NullTokenizer, vocab_size: 32000}
"""


def test_an_experiment_is_read_with_the_file_of_its_settings(tmp_path: Path) -> None:
    experiment = tmp_path / "train.yaml"
    experiment.write_text(
        "defaults:\n  - _self_\n  - train: small\nexperiment:\n  task:\n    entrypoint: flagscale/train/train_gpt.py\n"
        "  runner: {nnodes: 2, nproc_per_node: 8}\n  envs: {NCCL_P2P_DISABLE: 1}\n"
    )
    with pytest.raises(InputError, match=r"train/'small'\.yaml, which is not at hand"):
        autoplan.read(experiment)
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "small.yaml").write_text(SETTINGS)
    launch = autoplan.read(experiment).launch
    plan = launch.plan
    # A switch that is off is no option: the optimizer is whole.
    assert (plan.tp, plan.sp, plan.dp, plan.sharding, plan.global_batch) == (4, True, 4, "none", 16)
    assert (launch.target, launch.model.num_layers, launch.model.gated_mlp) == ("megatron-lm", 4, True)
    assert {item.option for item in launch.unread if item.matters} == {"NCCL_P2P_DISABLE"}
    alone = autoplan.read(tmp_path / "train" / "small.yaml", devices=16).launch
    assert (alone.plan, alone.model) == (plan, launch.model)
