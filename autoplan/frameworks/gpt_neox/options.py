"""Option table of GPT-NeoX ea7aefd8 (2026-05): the keys of its YAML files, with their defaults.

Places are below megatron/: neox_arguments/neox_args.py and deepspeed_args.py.  Dashes in keys count as underscores.
"""

from __future__ import annotations

from typing import Literal

from autoplan.frameworks.common.option_table import Assumed, Row, count, number, optional_count, switch, word
from autoplan.frameworks.common.options import Options, whole_names
from autoplan.spec.enums import Recompute

TP = count("model_parallel_size", "tp", 0)  # 0, like 1, is none
PP = count("pipe_parallel_size", "pp", 0)  # 0 runs without the pipeline engine, 1 in it
SP = switch("sequence_parallel", "sp")
TOTAL = optional_count("train_batch_size", "global_batch")
MICRO_BATCH = optional_count("train_micro_batch_size_per_gpu", "micro_batch")
ACCUMULATION = count("gradient_accumulation_steps", "num_microbatches", 1)
RECOMPUTE = switch("checkpoint_activations", "recompute", Recompute.NONE, on=Recompute.FULL, off=Recompute.NONE)

LENGTH = count("seq_length", "training.seq_len")
SIZES: tuple[Row, ...] = (
    count("num_layers", "model.num_layers"),
    count("hidden_size", "model.hidden_size"),
    count("num_attention_heads", "model.num_heads"),
    optional_count("num_kv_heads", "model.num_kv_heads"),
    optional_count("sliding_window_width", "model.window"),
)
_POSITIONS = {"rotary": "rope", "learned": "learned", "alibi": "alibi", "none": "none", "sinusoidal": "none"}
FORM: tuple[Row, ...] = (
    word("pos_emb", "model.position_embedding", "learned", _POSITIONS),
    number("rotary_emb_base", "model.rope_base", 10000.0),
    switch("no_weight_tying", "model.tied_embeddings", True, on=False, off=True),
    switch("use_bias_in_norms", "model.norm_bias", True),
    switch("use_bias_in_mlp", "model.mlp_bias", True),
    switch("use_bias_in_attn_linear", "model.qkv_bias", True),
    switch("use_qk_layernorm", "model.qk_norm", "none", on="full", off="none"),
)
# (kind of norm, whether it has weights)
NORMS: dict[str, tuple[Literal["layernorm", "rmsnorm"], bool]] = {
    "layernorm": ("layernorm", True),
    "te_layernorm": ("layernorm", True),
    "non_parametric_layernorm": ("layernorm", False),
    "rmsnorm": ("rmsnorm", True),
    "te_rmsnorm": ("rmsnorm", True),
}
GATED = ("geglu", "swiglu", "reglu", "bilinear", "glu")

# Tokens of the tokenizers that a file names by their kind or by their file (tokenizer/tokenizer.py).
VOCABULARIES = {"GPT2BPETokenizer": 50257, "HFGPT2Tokenizer": 50257, "CharLevelTokenizer": 512}
VOCABULARY_FILES = {"20B_tokenizer": 50277, "gpt2-vocab": 50257}

MODEL_KEYS = frozenset(row.key for row in (*SIZES, *FORM)) | {
    *("norm", "activation", "intermediate_size", "expansion_factor", "mlp_multiple_of", "mlp_type", "gpt_j_residual"),
    *("gpt_j_tied", "max_position_embeddings", "padded_vocab_size", "moe_num_experts"),
}


def _unpriced(key: str, why: str, *priced: object) -> Assumed:
    return Assumed(key, priced or (False, 0, {}, []), why)


ASSUMED: tuple[Assumed, ...] = (
    _unpriced("checkpoint_num_layers", "units of several layers keep less than is priced", 1),
    _unpriced("checkpoint_in_cpu", "activations are priced on the device"),
    _unpriced("make_vocab_size_divisible_by", "priced with a vocabulary padded to multiples of 128", 128),
    _unpriced("num_unique_layers", "priced with weights of its own for every layer"),
    _unpriced("use_bnb_optimizer", "moments are priced in fp32"),
    _unpriced("te_columnparallel", "priced as GPT-NeoX's own layers"),
    _unpriced("te_rowparallel", "priced as GPT-NeoX's own layers"),
    _unpriced("te_layernorm_mlp", "priced as GPT-NeoX's own layers"),
    _unpriced("te_mha", "priced as GPT-NeoX's own layers"),
    _unpriced("te_fp8_mha", "priced in 16 bits"),
    _unpriced("z_loss", "the loss is priced without it"),
    _unpriced("curriculum_learning", "every step is priced with the whole length"),
    _unpriced("data_efficiency", "not priced"),
    _unpriced("compression_training", "not priced"),
    _unpriced("elasticity", "not priced"),
    _unpriced("autotuning", "batch and stage are priced as they are written"),
    _unpriced("sparse_gradients", "gradients of the embedding are priced whole"),
    _unpriced("sparsity_config", "not priced"),
    _unpriced("profile_backward", "not priced"),
    _unpriced("log_grad_norm", "not priced"),
    _unpriced("log_optimizer_states", "not priced"),
    _unpriced("log_gradient_noise_scale", "not priced"),
    _unpriced("comms_logger", "waits for the device at every collective; not priced", {"enabled": False}),
    _unpriced("wall_clock_breakdown", "waits for the device in every phase; not priced", False, True),
    *(
        Assumed(key)  # of small effect, or already priced
        for key in (
            *("gas", "bias_gelu_fusion", "bias_dropout_fusion", "rope_fusion", "layernorm_fusion", "rmsnorm_fusion"),
            *("use_flashattn_swiglu", "scaled_masked_softmax_fusion", "fp16_lm_cross_entropy", "rotary_pct"),
            *("attention_softmax_in_fp32", "apply_query_key_layer_scaling", "output_layer_parallelism"),
            *("contiguous_checkpointing", "synchronize_each_layer", "deepspeed_activation_checkpointing"),
            *("use_cpu_initialization", "onnx_safe", "lazy_mpu_init", "rotary_save_freqs_buffer", "clip_grad"),
            *("opt_pos_emb_offset", "prescale_gradients", "gradient_predivide_factor", "log_grad_pct_zeros"),
            *("log_param_norm", "rpe_num_buckets", "rpe_max_distance", "moe_expert_interval", "deepspeed"),
        )
    ),
)

# Keys that affect neither time nor memory of a step: whole names, or families of them.
HARMLESS = whole_names(
    # learning rate, update and loss
    "lr lr_* min_lr min_lr_* max_lr max_lr_* warmup weight_decay weight_decay_* override_lr_scheduler scheduler",
    "use_checkpoint_lr_scheduler gradient_clipping loss_scale loss_scale_window min_scale hysteresis",
    "dynamic_loss_scale initial_scale_power use_mup mup_* coord_check zero_allow_untested_optimizer",
    # checkpoints
    "save save_* load finetune no_save_* no_load_* checkpoint checkpoint_factor checkpoint_scale",
    "checkpoint_validation_with_forward_pass extra_save_iters keep_last_n_checkpoints s3_* config_files iteration",
    # logs
    "log_dir log_interval steps_per_print tensorboard tensorboard_* wandb wandb_* use_wandb use_wandb_* comet comet_*",
    "use_comet use_comet_* csv_monitor monitor git_hash dump_state flops_profiler peak_theoretical_tflops comment",
    "memory_profiling memory_profiling_path profile profile_step_start profile_step_stop char_level_ppl",
    # data and tokens
    "data_path data_impl dataset_impl train_iters train_epochs train_data_* valid_data_* test_data_* train_label_*",
    "valid_label_* test_label_* train_reward_* valid_reward_* test_reward_* pos_train_* pos_valid_* pos_test_*",
    "neg_train_* neg_valid_* neg_test_* weight_by_num_documents weighted_sampler_alpha split mmap_warmup num_workers",
    "use_shared_fs allow_chopped eod_mask_loss short_seq_prob vocab_file merge_file tokenizer_type",
    "online_dataserver_*",
    # evaluation and text
    "eval_* exit_* do_valid do_test text_gen_type temperature top_k top_p maximum_tokens prompt_end sample_input_file",
    "sample_output_file num_samples recompute return_logits serve_model_weights weight_server_port",
    # numbers: seeds, starts, scales
    "seed init_method init_method_std output_layer_init_method output_layer_init_method_std rms_norm_epsilon",
    "layernorm_epsilon scalenorm_epsilon te_fp8_format te_fp8_wgrad te_fp8_amax_* te_fp8_margin gmlp_attn_dim",
    # the process
    "distributed_backend hostfile master_addr master_port launcher deepspeed_mpi deepspeed_slurm global_num_gpus",
    "force_multi no_ssh_check account detect_nvlink_pairs rank local_rank user_script adlr_*",
)


def has_section(options: Options, key: str) -> bool:
    """Return whether a table such as fp16 says that it is on."""
    return options.has(key) and options.inside(key).flag("enabled")
