"""Are scripts followed that a script runs or submits, with the variables and arguments that it gives them?"""

from __future__ import annotations

from pathlib import Path

import pytest

from autoplan.base.errors import InputError
from autoplan.frameworks.common.launch import Launch, LaunchContext
from autoplan.frameworks.common.shell import read_script
from autoplan.frameworks.launch_files import read_launch

MODEL = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 8192 --max-position-embeddings 8192 "
    "--vocab-size 128256 --bf16 --global-batch-size 128"
)
TRAIN = f"""#!/bin/bash
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
TP=${{TP:-1}}
srun torchrun --nnodes $SLURM_NNODES --nproc-per-node 8 pretrain_gpt.py {MODEL} \\
  --tensor-model-parallel-size $TP --pipeline-model-parallel-size ${{PP:-1}} --micro-batch-size ${{MBS:-1}}
"""
ARGUMENTS = f"""#!/bin/bash
TP=1
PP=1
while [[ $# -gt 0 ]]; do
  case $1 in
    --tp) TP=$2; shift 2;;
    --pp) PP=$2; shift; shift;;
    --) shift; break;;
    *) shift;;
  esac
done
ARGS=(--tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP)
torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py {MODEL} --micro-batch-size 1 "${{ARGS[@]}}"
"""
PLACES = f"""#!/bin/bash
torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py {MODEL} --micro-batch-size 1 \\
  --tensor-model-parallel-size $1 --pipeline-model-parallel-size ${{2:-1}} ${{@:3}}
"""


def launched(folder: Path, text: str, **variables: str) -> Launch:
    (folder / "train.sh").write_text(TRAIN)
    (folder / "arguments.sh").write_text(ARGUMENTS)
    (folder / "places.sh").write_text(PLACES)
    (folder / "submit.sh").write_text(text)
    return read_launch(folder / "submit.sh", LaunchContext(variables=tuple(variables.items())))


@pytest.mark.parametrize(
    ("text", "degrees", "micro_batch", "num_devices"),
    [
        ("sbatch --nodes=2 --export=ALL,TP=4,PP=2,MBS=2 train.sh\n", (4, 2), 2, 16),
        ('export TP=8\nsbatch -N 4 --gpus-per-node=8 --export=ALL,PP="2" train.sh\n', (8, 2), 1, 32),
        ("export TP=8\nsbatch --export=NONE,PP=2 train.sh\n", (1, 2), 1, 16),
        ("export TP=8\nsbatch --export-file=env.txt train.sh\n", (8, 1), 1, 16),
        ("TP=8\nsbatch train.sh\n", (1, 1), 1, 16),
        ("set -a\nTP=8\nsbatch train.sh\n", (8, 1), 1, 16),
        ("TP=2 PP=4 sbatch train.sh\n", (2, 4), 1, 16),
        ('sbatch --export=ALL,TP=4 --wrap "bash train.sh"\n', (4, 1), 1, 16),
        ("qsub -v TP=4,PP=2 train.sh\n", (4, 2), 1, 16),
        ("export TP=4\nqsub train.sh\n", (1, 1), 1, 16),
        ("job=$(sbatch --parsable --export=ALL,TP=4 train.sh)\necho $job\n", (4, 1), 1, 16),
        ("for tp in 2 4; do\n  sbatch --export=ALL,TP=$tp train.sh\ndone\n", (2, 1), 1, 16),
        ("#SBATCH --nodes=4\nTP=4 srun bash train.sh\n", (4, 1), 1, 32),
        ("sbatch <<EOF\n#!/bin/bash\n#SBATCH --nodes=4\nexport TP=8\nsrun bash train.sh\nEOF\n", (8, 1), 1, 32),
        ("cat > job.slurm <<EOF\nsrun bash -c 'TP=4 bash train.sh'\nEOF\nsbatch job.slurm\n", (4, 1), 1, 16),
        ("bash arguments.sh --tp 8 --other 1 --pp 2 -- --tp 4\n", (8, 2), 1, 16),
        ("bash places.sh 4 2 --use-distributed-optimizer\n", (4, 2), 1, 16),
        ("env TP=4 ./train.sh\n", (4, 1), 1, 16),
        ('cd "$(dirname "$0")" && bash "$(dirname "$0")/train.sh"\n', (1, 1), 1, 16),
    ],
)
def test_a_started_script_is_read_with_what_it_is_given(
    tmp_path: Path, text: str, degrees: tuple[int, int], micro_batch: int, num_devices: int
) -> None:
    plan = launched(tmp_path, text).plan
    assert (plan.tp, plan.pp) == degrees
    assert plan.micro_batch == micro_batch
    assert plan.num_devices == num_devices


def test_arguments_and_slices_of_them_reach_the_command(tmp_path: Path) -> None:
    assert launched(tmp_path, "bash places.sh 4 1 --use-distributed-optimizer\n").plan.sharding == "zero1"
    assert launched(tmp_path, "bash places.sh 4 1\n").plan.sharding == "none"


def test_what_the_user_sets_goes_before_what_a_script_gives(tmp_path: Path) -> None:
    assert launched(tmp_path, "sbatch --export=ALL,TP=4 train.sh\n", TP="8").plan.tp == 8


def test_the_answer_says_which_file_was_read_and_with_what(tmp_path: Path) -> None:
    unread = launched(tmp_path, "for tp in 2 4; do sbatch --export=ALL,TP=$tp train.sh; done\n").unread
    why = next(item.why for item in unread if item.option == "submit.sh")
    assert why == "starts train.sh with TP=2, which is read instead"
    loop = next(item for item in unread if item.option == "for tp")
    assert loop.matters
    assert loop.why == "starts several runs, of which the first is read: --set names another"


def test_a_script_that_starts_itself_or_nothing_is_an_error_of_its_own(tmp_path: Path) -> None:
    for text in ("sbatch submit.sh\n", "echo train.sh\n", "sbatch other.sh\n"):
        with pytest.raises(InputError, match=r"submit\.sh: "):
            launched(tmp_path, text)


def test_a_started_script_that_only_prepares_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "prepare.sh").write_text("set -e\npip install wheels\n")
    assert launched(tmp_path, "bash prepare.sh\nTP=4 bash train.sh\n").plan.tp == 4
    here = "bash prepare.sh\npython3 MaxText/train.py base.yml per_device_batch_size=2 max_target_length=2048\n"
    for target in (None, "maxtext"):
        (tmp_path / "submit.sh").write_text(here)
        with pytest.raises(InputError, match=r"submit\.sh: (?!is not a known)"):
            read_launch(tmp_path / "submit.sh", LaunchContext(), target)


def test_scripts_that_start_one_another_end(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text("bash b.sh\n")
    (tmp_path / "b.sh").write_text("bash a.sh\n")
    with pytest.raises(InputError):
        read_launch(tmp_path / "a.sh", LaunchContext())


def test_associative_arrays_are_expanded() -> None:
    script = read_script("declare -A C=([tp]=4 [pp]=2)\nC[cp]=8\nk=pp\nrun ${C[tp]} ${C[$k]} ${C[cp]} ${C[ep]}\n")
    assert script.commands[0].words[:4] == ("run", "4", "2", "8")
    assert "$" in script.commands[0].words[4]


@pytest.mark.parametrize(
    "text",
    [
        "torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer data.max_length=2048 data.train_batch_size=64 "
        "data.micro_batch_size_per_gpu=4 data.use_dynamic_bsz=False model.path=qwen2.5-7b engine=megatron "
        "engine.tensor_model_parallel_size=2 ++engine.pipeline_model_parallel_size=2 ~engine.context_parallel_size=4\n",
        "torchrun --nnodes=1 --nproc_per_node=8 run_recipe.py --recipe llama3_8b_pretrain_config "
        "model.tensor_model_parallel_size=2 ++model.pipeline_model_parallel_size=2 ~model.context_parallel_size=4 "
        "train.global_batch_size=64 train.micro_batch_size=1 model.seq_length=8192\n",
    ],
    ids=["verl", "megatron-bridge"],
)
def test_what_hydra_adds_is_read_and_what_it_takes_away_is_listed(tmp_path: Path, text: str) -> None:
    launch = launched(tmp_path, text)
    assert (launch.plan.tp, launch.plan.pp, launch.plan.cp) == (2, 2, 1)
    taken = [item for item in launch.unread if item.option.startswith("~")]
    assert [item.why for item in taken] == ["takes a default away, which is priced as kept"]
    assert taken[0].matters


def test_the_last_of_several_options_counts_where_a_sourced_file_gives_one(tmp_path: Path) -> None:
    (tmp_path / "env.sh").write_text("export GBS=${GBS:-256}\nOVERRIDE=${OVERRIDE:-8}\n")
    text = f"source ./env.sh\ntorchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py {MODEL} --micro-batch-size 1 "
    text += "--tensor-model-parallel-size 2 --global-batch-size $GBS --tensor-model-parallel-size $OVERRIDE\n"
    assert launched(tmp_path, text).plan.tp == 8
    assert launched(tmp_path, text, OVERRIDE="4", GBS="512").plan.global_batch == 512


def test_a_script_that_cannot_be_followed_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"submit\.sh: a script is nested more than \d+ deep"):
        launched(tmp_path, "if [ -f x ]; then\n" * 40 + TRAIN + "fi\n" * 40)
