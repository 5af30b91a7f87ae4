"""Bytes that two layers of transformers' models keep for their backward pass, and those that are said to be kept."""

from __future__ import annotations

import json
from typing import Any

from saved_bytes import saved_sizes

from autoplan.api.problem import make_problem
from autoplan.cost.kernels.block_shapes import layer_shapes
from autoplan.cost.memory.recompute import activation_parts, whole_bytes
from autoplan.readers.huggingface import read_huggingface
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, PlanBatch

SEQ_LEN = 64
SIZES: dict[str, Any] = {
    **{"vocab_size": 128, "hidden_size": 96, "intermediate_size": 136, "num_attention_heads": 6, "head_dim": 16},
    **{"num_key_value_heads": 2, "pad_token_id": None, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "conv_L_cache": 3,
}
# Norms of each make, of queries and keys too; layer norms, of torch and written out; one norm for both blocks; gates
# and none; trained activations; queries of which a part turns; convolutions; one bidirectional.
KINDS = (
    *("llama", "qwen2", "qwen3", "gemma", "olmo2", "glm4", "ernie4_5", "smollm3", "granite"),
    *("hunyuan_v1_dense", "arcee", "jais2", "starcoder2", "gpt_bigcode", "bert", "lfm2", "gemma3_text"),
    *("cohere", "cohere2", "apertus", "persimmon", "helium", "nemotron", "stablelm", "olmo", "phi", "phi3", "glm"),
)
# A cache would copy the values, which stay in what one matrix makes, for the norms of queries and keys.
OPTIONS = {"persimmon": {"use_cache": False}}


def kept_bytes(spec: ModelSpec, attention: str) -> float:
    """Bytes that all layers are said to keep of two sequences, by the kind of attention."""
    problem = make_problem(spec, cluster="h100-sxm:1x1", seq_len=SEQ_LEN, framework="transformers", attention=attention)
    batch = PlanBatch.of([ParallelPlan(global_batch=2, micro_batch=2)], spec.num_layers)
    of_block = {
        block: float(whole_bytes(activation_parts(problem, batch, block, shape))[0])
        for block, shape in layer_shapes(spec).items()
    }
    return sum(of_block[block] for layer in spec.layers for block in layer)


def excess(kind: str) -> float:
    """Relative excess of what two layers more are said to keep, of two sequences in bf16, over what torch keeps.

    Attention has a kernel, norms are those of torch.
    """
    import torch
    import transformers

    ours, theirs = [], []
    for num_layers in (2, 4):
        layers = {"layer_types": ["conv", "full_attention"] * (num_layers // 2)} if kind == "lfm2" else {}
        config = transformers.AutoConfig.for_model(kind, **SIZES, **layers, num_hidden_layers=num_layers)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = config.attention_dropout = 0.0
        config.embedding_dropout = config.residual_dropout = 0.0
        auto: Any = transformers.AutoModelForMaskedLM if kind == "bert" else transformers.AutoModelForCausalLM
        model = auto.from_config(config, attn_implementation="sdpa").to(torch.bfloat16).train()
        known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        with saved_sizes(known) as sizes:
            model(input_ids=torch.randint(3, 99, (2, SEQ_LEN)), **OPTIONS.get(kind, {}))
        theirs.append(sum(sizes.values()))
        table = json.loads(json.dumps(config.to_dict(), default=str))
        ours.append(kept_bytes(read_huggingface(table, kind), "flash"))
    return (ours[1] - ours[0]) / (theirs[1] - theirs[0]) - 1
