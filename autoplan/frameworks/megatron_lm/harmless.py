"""Options of Megatron-LM that affect neither time nor memory of a step, or so little that they are free to choose.

Whole names, or families of them: an option of a fork that only begins alike is listed.
"""

from __future__ import annotations

from autoplan.frameworks.common.options import whole_names

HARMLESS = whole_names(
    # learning rate, update and loss
    "lr lr_* min_lr min_lr_* decoupled_lr decoupled_min_lr head_lr head_lr_* adam_beta1 adam_beta2 adam_eps",
    "sgd_momentum weight_decay weight_decay_incr_style start_weight_decay end_weight_decay clip_grad",
    "override_opt_scheduler override_lr_scheduler override_opt_param_scheduler use_checkpoint_lr_scheduler",
    "use_checkpoint_opt_param_scheduler use_checkpoint_opt_scheduler loss_scale loss_scale_window initial_loss_scale",
    "min_loss_scale hysteresis moe_aux_loss_* moe_z_loss_* mtp_loss_* calculate_per_token_loss accumulate_allreduce*",
    # checkpoints
    "save save_interval save_* load load_tag load_main_params_from_ckpt load_model_opt_format",
    "load_debug_rollout_data* no_save_* no_load_* ckpt_* dist_ckpt_* auto_detect_ckpt_format async_save async_ckpt_*",
    "use_persistent_ckpt_worker finetune pretrained_checkpoint exit_on_missing_checkpoint auto_continue_train",
    "disable_last_saving*",
    # logs and profiles
    "log_* logging_* tensorboard_* wandb_* mlflow_* one_logger_* timing_log_* enable_one_logger disable_tensorboard*",
    "disable_wandb* disable_mlflow* stderr_sink_level dump_* debug_scheduler_table comment env_vars",
    "moe_per_layer_logging",
    "use_pytorch_profiler profile profile_ranks profile_step_start profile_step_end profile_steps profile_log_ranks",
    "profile_target",
    # data and tokens
    "data_path data_dir data_impl data_cache_path data_source_path data_args_path data_file_list*",
    "data_per_class_fraction finetune_data_* mock_data train_iters train_samples train_data train_data_path",
    "train_data_exact_num_epochs train_num_workers valid_data valid_data_path valid_num_workers test_data",
    "test_data_path test_num_workers train_weighted_split_paths* valid_weighted_split_paths*",
    "test_weighted_split_paths* per_split_data_args_path num_dataset_builder_threads dataloader_type dataloader_seed",
    "dataloader_save dataloader_fast_cache_load dataloader_defer_npy_index_mmap num_workers split mmap_bin*",
    "no_mmap_bin* eod_mask_loss reset_position_ids reset_attention_mask create_attention_mask* tokenizer_* tiktoken_*",
    "trust_remote_code vocab_file merge_file",
    # evaluation, ends and faults
    "eval_interval eval_iters eval_steps eval_config eval_ppl eval_global_batch_size eval_micro_batch_size",
    "eval_prompt_data eval_function_path eval_*_key eval_max_* eval_min_* eval_temperature eval_top_k eval_top_p",
    "exit_* rerun_* error_injection_* check_for_*",
    # numbers: seeds, starts, scales of what is priced anyway
    "seed *_seed init_method init_method_* *_init_method *_init_method_* perform_initialization",
    "data_parallel_random_init te_rng_tracker use_te_rng_tracker norm_epsilon layernorm_epsilon no_persist_layer_norm",
    "attention_softmax_in_fp32 rotary_percent rotary_interleaved rotary_scaling_factor rope_type rope_scaling_factor",
    "rope_scaling use_rope_scaling use_rotary* yarn_* mscale mscale_all_dim add_position_embedding",
    "no_add_position_embedding add_class_* glu_linear* moe_router_load_balancing_type moe_router_score_function",
    "moe_router_topk_scaling_factor moe_router_dtype moe_router_num_groups moe_router_group_topk",
    "moe_router_pre_softmax moe_router_enable_expert_bias moe_router_bias_update_rate moe_router_force_load_balancing",
    "moe_router_force_biased fp8_amax* fp8_margin fp8_interval",
    # the process
    "distributed_timeout* distributed_backend manual_gc manual_gc_* transformer_impl enable_experimental",
    "enable_gpt_oss use_mcore_models deprecated_use_mcore_models barrier_with_level_1_timing",
    "no_barrier_with_level_1_timing",
)
