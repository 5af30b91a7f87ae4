"""Do layers of transformers' models keep as many bytes for their backward pass as is said?"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from layer_bytes import ADAPTERS, KINDS, PAIRS, SEQ_LEN, excess, kept_bytes
from saved_bytes import saved_sizes

from autoplan.readers.huggingface import read_huggingface


@pytest.mark.parametrize("kind", [*KINDS, *PAIRS])
def test_two_more_layers_keep_what_is_said(kind: str) -> None:
    pytest.importorskip("torch"), pytest.importorskip("transformers")
    assert excess(kind) == pytest.approx(0.0, abs=0.05)


@pytest.mark.parametrize("kind", [*KINDS, *PAIRS])
def test_two_more_layers_beside_adapters_of_peft_keep_what_is_said(kind: str) -> None:
    pytest.importorskip("torch"), pytest.importorskip("peft")
    assert excess(kind, ADAPTERS) == pytest.approx(0.0, abs=0.05)


@pytest.mark.parametrize("targets", [("q", "v"), ("k", "wo"), ("o", "wi")])
def test_inputs_of_matrices_without_an_adapter_are_not_kept(targets: tuple[str, ...]) -> None:
    pytest.importorskip("torch"), pytest.importorskip("peft")
    assert excess("t5", replace(ADAPTERS, targets=targets)) == pytest.approx(0.0, abs=0.05)


def test_adapters_keep_what_dropout_leaves() -> None:
    pytest.importorskip("torch"), pytest.importorskip("peft")
    assert excess("bart", replace(ADAPTERS, dropout=0.1)) == pytest.approx(0.0, abs=0.05)


@pytest.mark.parametrize("activation", ["relu", "gated-silu", "gated-gelu"])
def test_a_layer_of_t5_keeps_what_is_said(activation: str) -> None:
    """Scores in 16 bits, written out; norms keep their input beside an fp32 copy."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    sizes = {
        "d_model": 64,
        "d_kv": 24,
        "d_ff": 160,
        "num_heads": 4,
        "num_layers": 2,
        "dropout_rate": 0.0,
        "feed_forward_proj": activation,
    }
    config = transformers.AutoConfig.for_model("t5", attn_implementation="eager", vocab_size=512, **sizes)
    spec = read_huggingface(json.loads(json.dumps(config.to_dict(), default=str)), "t5")
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).to(torch.bfloat16).train()
    layer = model.encoder.block[1]
    hidden = torch.randn(2, SEQ_LEN, 64, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.randn(1, 4, SEQ_LEN, SEQ_LEN, dtype=torch.bfloat16, requires_grad=True)
    known = {tensor.untyped_storage().data_ptr() for tensor in (*layer.parameters(), bias)}
    with saved_sizes(known) as kept:
        layer(hidden, position_bias=bias)
    assert spec.encoder is not None
    ours = kept_bytes(spec.encoder.layers, "unfused") / spec.encoder.layers.num_layers
    assert ours == pytest.approx(sum(kept.values()), rel=0.01)
