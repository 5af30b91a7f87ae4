"""Arguments of Megatron-LM that Primus' presets set (fd1eeab); the option table is that of Megatron-LM."""

from __future__ import annotations

from autoplan.frameworks.common.option_table import Value

# Values in modules/megatron/pre_trainer.yaml and models/megatron/language_model.yaml that differ from Megatron-LM's.
TRAINER: dict[str, Value] = {
    "micro_batch_size": 2,
    "global_batch_size": 16,
    "seq_length": 1024,
    "sequence_parallel": True,
    "use_distributed_optimizer": True,
    "bf16": True,
}
LANGUAGE_MODEL: dict[str, Value] = {
    "num_layers": 24,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "swiglu": True,
    "untie_embeddings_and_output_weights": True,
    "add_bias_linear": False,
}
SWITCHED_ON = tuple(key for key, value in (TRAINER | LANGUAGE_MODEL).items() if value is True)
