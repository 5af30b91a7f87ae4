"""Losses over preferences: two sequences a sample, and a reference that only goes forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import autoplan
from autoplan.base.errors import InputError
from autoplan.cost.kernels.arithmetic import count_parameters, model_flops_per_token
from autoplan.frameworks.axolotl import read as axolotl
from autoplan.frameworks.common.launch import LaunchContext
from autoplan.frameworks.hf_trainer import read as hf_trainer
from autoplan.frameworks.llama_factory import read as llama_factory
from autoplan.readers.finetuning import preference_of
from autoplan.readers.lengths import load_lengths
from autoplan.readers.model import load_model
from autoplan.spec.finetuning import FineTuning
from autoplan.spec.preference import Preference
from autoplan.spec.search_result import RankedPlan
from autoplan.spec.training import TrainingSpec
from commands import run

MODEL = "llama3.2-1b"
COPY = Preference(reference="copy")


def best_of(micro_batch: int = 1, global_batch: int = 64, **options: Any) -> RankedPlan:
    """The cost of one plan, fully sharded on one node."""
    plan = {"sharding": "zero3", "micro_batch": micro_batch, "recompute": "full"}
    return autoplan.estimate(
        MODEL,
        cluster="h100-sxm:1x8",
        global_batch=global_batch,
        seq_len=2048,
        framework="transformers",
        plan=plan,
        **options,
    ).file.best


def test_pairs_without_a_reference_are_twice_as_many_sequences() -> None:
    pairs, plain = best_of(loss="dpo", reference="none"), best_of(micro_batch=2, global_batch=128)
    assert pairs.step_s == plain.step_s
    assert pairs.memory_bytes == plain.memory_bytes
    assert pairs.tokens_per_s_per_device == plain.tokens_per_s_per_device
    assert pairs.mfu == plain.mfu


def test_a_reference_goes_forward_once_more() -> None:
    without, beside = best_of(loss="dpo", reference="none"), best_of(loss="dpo")
    assert without.terms_s["reference"] == 0.0
    # Without recomputation a step is one forward pass and two backward; with it one more, and here the reference's.
    assert beside.step_s == pytest.approx(5 / 4 * without.step_s, rel=0.06)
    forward = 2 / 4 * (beside.terms_s["gemm"] / 1.5)
    assert beside.terms_s["reference"] > forward / 2
    flops = [model_flops_per_token(load_model(MODEL), 2048, runs_reference=runs) for runs in (False, True)]
    assert flops[1] == pytest.approx(4 / 3 * flops[0])


def test_a_copy_holds_its_weights_as_the_model_is_sharded() -> None:
    """4 bytes a parameter over 8 ranks under FSDP, whose weights are in fp32."""
    without, beside = best_of(loss="dpo", reference="none"), best_of(loss="dpo", reference="copy")
    more = beside.memory_bytes - without.memory_bytes
    assert more == pytest.approx(4 * count_parameters(load_model(MODEL)) / 8, rel=0.1)


def test_the_base_of_adapters_needs_no_memory_as_a_reference() -> None:
    lora = FineTuning(rank=16)
    without, base, copy = (best_of(loss="dpo", reference=kind, finetune=lora) for kind in ("none", None, "copy"))
    assert base.memory_bytes == without.memory_bytes < copy.memory_bytes
    assert base.terms_s["reference"] == copy.terms_s["reference"] > 0
    training = TrainingSpec(seq_len=8, preference=Preference(), finetuning=lora)
    assert training.preference == Preference(reference="base")
    assert TrainingSpec(seq_len=8, preference=Preference()).preference == COPY
    with pytest.raises(InputError, match="not packed: leave document_len out"):
        TrainingSpec(seq_len=8, preference=Preference(), document_len=4)


def test_a_reward_model_has_scores_in_place_of_logits() -> None:
    scores, logits = best_of(loss="reward"), best_of(loss="dpo", reference="none")
    assert scores.terms_s["reference"] == 0.0
    assert scores.terms_s["head"] < 0.05 * logits.terms_s["head"]
    assert scores.memory_bytes < logits.memory_bytes
    model = load_model(MODEL)
    less = model_flops_per_token(model, 2048) - model_flops_per_token(model, 2048, has_scores=True)
    assert less == 6 * model.hidden_size * model.vocab_size


def test_a_search_over_pairs_is_proven() -> None:
    found = autoplan.search(MODEL, cluster="h100-sxm:1x8", global_batch=64, seq_len=2048, loss="dpo")
    assert found.file.certificate is not None
    assert found.file.certificate.proven
    assert found.file.framework.name == "transformers"
    assert "frozen copy" in autoplan.export(found, to="accelerate").texts["launch.sh"]


def test_pairs_that_vary_wait_for_the_longest_of_both(tmp_path: Path) -> None:
    data = tmp_path / "pairs.jsonl"
    data.write_text('{"prompt": "four", "chosen": "four", "rejected": "a longer answer"}\n')
    lengths = load_lengths(str(data))
    assert lengths.histogram == ((2 + 8, 1), (5 + 8, 1))
    # A conversation as an answer has its prompt.
    asked = '{"role": "user", "content": "four"}'
    answers = (f'[{asked}, {{"role": "assistant", "content": "{text}"}}]' for text in ("four", "a longer answer"))
    data.write_text('{{"prompt": "four", "chosen": {}, "rejected": {}}}\n'.format(*answers))
    assert load_lengths(str(data)).histogram == lengths.histogram
    options: dict[str, Any] = {"lengths": "200:3,2000:1", "batching": "padded"}
    pairs = best_of(loss="dpo", reference="none", **options)
    assert pairs.step_s == best_of(micro_batch=2, global_batch=128, **options).step_s
    assert pairs.terms_s["uneven_lengths"] > 0
    with pytest.raises(InputError, match="pairs of sequences are not packed: use batching padded"):
        best_of(loss="dpo", lengths="200:3,2000:1")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"loss": "kto"}, "preference loss: loss must be one of dpo, reward, got 'kto'"),
        ({"reference": "copy"}, "--reference 'copy' needs a preference loss"),
        ({"loss": "dpo", "reference": "base"}, "reference base needs adapters"),
        ({"loss": "reward", "reference": "copy"}, "a reward model has no reference"),
        ({"loss": "dpo", "framework": "megatron-core"}, "not for megatron-core: use --framework transformers"),
    ],
)
def test_what_is_not_priced_is_refused(options: dict[str, Any], says: str) -> None:
    known = {"framework": "transformers", **options}
    with pytest.raises(InputError, match=says):
        autoplan.search(MODEL, cluster="h100-sxm:1x8", global_batch=64, seq_len=2048, **known)


# -- files -------------------------------------------------------------------------------------------------------------

CONTEXT = LaunchContext(num_devices=8, devices_per_node=8, model=load_model(MODEL))


@pytest.mark.parametrize(
    ("settings", "preference"),
    [
        ("stage: dpo", COPY),
        ("stage: dpo\npref_loss: orpo", Preference(reference="none")),
        ("stage: rm", Preference(loss="reward", reference="none")),
        ("stage: sft", None),
    ],
)
def test_stages_of_llama_factory_are_read(settings: str, preference: Preference | None) -> None:
    text = f"model_name_or_path: x\n{settings}\nfinetuning_type: full\ncutoff_len: 2048\nbf16: true\n"
    text += "per_device_train_batch_size: 2\n"
    launch = llama_factory.read(text, CONTEXT)
    assert launch.training.preference == preference
    assert launch.plan.global_batch == 16


@pytest.mark.parametrize("loss", ["grpo", "ppo"])
def test_several_models_at_once_are_refused_with_what_they_need(loss: str) -> None:
    options: dict[str, Any] = {"cluster": "h100-sxm:1x8", "global_batch": 8, "seq_len": 2048}
    with pytest.raises(
        InputError, match="would need the tokens generated in a step, and devices and layout of actor, critic"
    ):
        autoplan.search("llama3-8b", loss=loss, **options)


def test_adapters_of_llama_factory_take_their_base() -> None:
    text = "stage: dpo\nfinetuning_type: lora\ncutoff_len: 2048\nbf16: true\nper_device_train_batch_size: 1\n"
    assert llama_factory.read(text, CONTEXT).training.preference == Preference(reference="base")
    named = llama_factory.read(text + "ref_model: some/other\n", CONTEXT)
    assert named.training.preference == COPY
    with pytest.raises(
        InputError,
        match="stage 'ppo' is not priced: only sft, pt, dpo and rm are: of several models at once it would need",
    ):
        llama_factory.read(text.replace("dpo", "ppo"), CONTEXT)


@pytest.mark.parametrize(
    ("settings", "preference"),
    [
        ("rl: dpo", COPY),
        ("rl: ipo\nprecompute_ref_log_probs: true", Preference(reference="none")),
        ("rl: simpo", Preference(reference="none")),
        ("reward_model: true", Preference(loss="reward", reference="none")),
    ],
)
def test_losses_of_axolotl_are_read(settings: str, preference: Preference) -> None:
    text = f"base_model: x\nmicro_batch_size: 1\nsequence_len: 2048\n{settings}\n"
    training = axolotl.read(text, CONTEXT).training
    assert training.preference == preference
    assert training.batching == ("full" if preference.loss == "reward" else "padded")
    with pytest.raises(InputError, match="rl 'grpo' is not priced: only dpo, ipo"):
        axolotl.read(text.replace(settings, "rl: grpo"), CONTEXT)


@pytest.mark.parametrize(
    ("program", "more", "preference"),
    [
        ("dpo.py", "--beta 0.1", COPY),
        ("dpo.py", "--precompute_ref_log_probs true", Preference(reference="none")),
        ("reward.py", "", Preference(loss="reward", reference="none")),
        ("sft.py", "", None),
    ],
)
def test_programs_of_trl_are_read(program: str, more: str, preference: Preference | None) -> None:
    script = f"torchrun --nproc-per-node 8 trl/scripts/{program} --per_device_train_batch_size 2 --max_length 2048"
    assert hf_trainer.read(f"{script} {more}", CONTEXT).training.preference == preference
    with pytest.raises(InputError, match=r"grpo.py: only training on the next token, on pairs \(dpo\)"):
        hf_trainer.read(script.replace(program, "grpo.py"), CONTEXT)


def test_what_was_read_says_the_loss(tmp_path: Path) -> None:
    text = f"base_model: {MODEL}\nmicro_batch_size: 2\nsequence_len: 2048\nrl: dpo\n"
    (tmp_path / "dpo.yaml").write_text(text)
    shown = " ".join(run(tmp_path, "read", "dpo.yaml", "--devices", "8").stdout.split())
    assert "loss preferences (DPO), two sequences per sample, against a frozen copy of the model" in shown
    assert "step 16 pairs, 1 micro-batch per replica" in shown
    (tmp_path / "dpo.yaml").write_text(f"{text}adapter: qlora\nlora_r: 16\noptimizer: adamw_torch_8bit\n")
    shown = " ".join(run(tmp_path, "read", "dpo.yaml", "--devices", "8").stdout.split())
    assert "flash attention, Adam with 8-bit moments trains QLoRA of rank 16 on q_proj+v_proj" in shown


def test_a_finetuning_file_names_its_loss(tmp_path: Path) -> None:
    path = tmp_path / "tuned.yaml"
    path.write_text("base_model: x\nrl: dpo\nadapter: lora\n")
    assert preference_of(path) == Preference()
    path.write_text("finetuning_type: lora\nstage: rm\n")
    assert preference_of(path) == Preference(loss="reward")
    assert preference_of(path, "dpo") == Preference()
    path.write_text("model_name_or_path: x\nuse_peft: true\n")
    assert preference_of(path) is None
