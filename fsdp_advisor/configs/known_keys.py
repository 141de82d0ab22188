"""The keys of configuration files that their consumers have. An unread key that is none of them is misspelt, or an argument of the script.

Source: transformers 5.23, training_args.py; accelerate 1.15, commands/launch.py and commands/config/config_args.py; trl 1.16, its
configurations and scripts/utils.py; axolotl 0.19, utils/schemas and integrations/*/args.py; deepspeed 0.19.8, runtime/config.py.
"""

from __future__ import annotations

_TRAINER = """
    accelerator_config activation_checkpointing activation_checkpointing_kwargs adam_beta1 adam_beta2 adam_epsilon
    auto_find_batch_size average_tokens_across_devices batch_eval_metrics bf16 bf16_full_eval data_seed dataloader_drop_last
    dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers
    dataloader_pin_memory dataloader_prefetch_factor ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters
    ddp_static_graph ddp_timeout debug deepspeed disable_tqdm do_eval do_predict do_train enable_jit_checkpoint
    eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start eval_steps eval_strategy eval_use_gather_object fp16
    fp16_full_eval fsdp fsdp_config full_determinism gradient_accumulation_steps gradient_checkpointing
    gradient_checkpointing_kwargs greater_is_better hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy
    hub_token ignore_data_skip include_for_metrics include_num_input_tokens_seen label_names label_smoothing_factor learning_rate
    length_column_name liger_kernel_config load_best_model_at_end local_rank log_level log_level_replica log_on_each_node
    logging_first_step logging_nan_inf_filter logging_steps logging_strategy lr_scheduler_kwargs lr_scheduler_type max_grad_norm
    max_steps metric_for_best_model neftune_noise_alpha num_train_epochs optim optim_args optim_target_modules output_dir
    parallelism_config per_device_eval_batch_size per_device_train_batch_size prediction_loss_only project push_to_hub
    remove_unused_columns report_to restore_callback_states_from_checkpoint resume_from_checkpoint run_name save_on_each_node
    save_only_model save_steps save_strategy save_total_limit seed skip_memory_metrics tf32 torch_compile torch_compile_backend
    torch_compile_mode torch_empty_cache_steps trackio_bucket_id trackio_space_id trackio_static_space_id train_sampling_strategy
    use_cache use_cpu use_liger_kernel warmup_steps weight_decay
"""
"""Arguments of the Trainer."""
_TRL = """
    activation_offloading assistant_only_loss attn_implementation beta bnb_4bit_quant_storage bnb_4bit_quant_type
    cache_implementation cast_lm_head_to_fp32 center_rewards_coefficient chat_template_kwargs chat_template_path columns
    completion_only_loss data_dir data_files dataset_config dataset_kwargs dataset_name dataset_num_proc dataset_streaming
    dataset_test_split dataset_text_field dataset_train_split datasets delta desirable_weight disable_dropout discopop_tau
    ds3_gather_for_generation dtype entropy_coef entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target eos_token
    epsilon epsilon_high eval_packing f_alpha_divergence_coef f_divergence_type fraction generation_batch_size generation_kwargs
    ignore_bias_buffers importance_sampling_level label_smoothing ld_alpha load_in_4bit load_in_8bit log_completions
    log_completions_hub_repo log_multimodal log_unique_prompts lora_alpha lora_dropout lora_modules_to_save lora_r
    lora_target_modules lora_target_parameters lora_task_type loss_type loss_weights mask_truncated_completions
    max_completion_length max_length max_tool_calling_iterations min_p model_init_kwargs model_name_or_path model_revision
    multi_objective_aggregation name num_completions_to_print num_generations num_generations_eval num_iterations
    off_policy_mask_threshold packing packing_strategy pad_to_multiple_of pad_token padding_free path precompute_ref_batch_size
    precompute_ref_log_probs ref_model_mixup_alpha ref_model_sync_steps repetition_penalty reward_funcs reward_model_name_or_path
    reward_weights router_aux_loss_coef sapo_temperature_neg
    sapo_temperature_pos scale_rewards shuffle_dataset split steps_per_generation streaming sync_ref_model
    temperature test_split_size top_entropy_quantile top_k top_p transformers_continuous_batching_config truncation_mode
    trust_remote_code undesirable_weight use_adaptive_entropy use_bias_correction_kl use_bnb_nested_quant use_dora use_peft
    use_rslora use_transformers_continuous_batching use_transformers_paged use_vllm use_weighting vespo_k_neg vespo_k_pos
    vespo_lambda_neg vespo_lambda_pos vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port
    vllm_importance_sampling_cap vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
    vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_max_model_length vllm_mode vllm_model_impl
    vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_structured_outputs_regex
    vllm_tensor_parallel_size
"""
"""Arguments of TRL's trainers, models and scripts, besides the Trainer's."""
_ACCELERATE = """
    aws_access_key_id aws_secret_access_key command_file commands compute_environment config_file cpu debug deepspeed_config
    deepspeed_config_file deepspeed_exclusion_filter deepspeed_hostfile deepspeed_inclusion_filter deepspeed_moe_layer_cls_names
    deepspeed_multinode_launcher distributed_type downcast_bf16 dynamo_backend dynamo_config dynamo_mode dynamo_use_dynamic
    dynamo_use_fullgraph dynamo_use_regional_compilation enable_cpu_affinity env fp8_amax_compute_algo fp8_amax_history_len
    fp8_backend fp8_config fp8_enable_fsdp_float8_all_gather fp8_format fp8_interval fp8_margin fp8_opt_level
    fp8_override_linear_precision fp8_pad_inner_dim fp8_use_autocast_during_eval fsdp_activation_checkpointing
    fsdp_activation_checkpointing_offload fsdp_auto_wrap_policy fsdp_backward_prefetch fsdp_config fsdp_cpu_ram_efficient_loading
    fsdp_forward_prefetch fsdp_min_num_params fsdp_offload_params fsdp_reshard_after_forward fsdp_sharding_strategy
    fsdp_state_dict_type fsdp_sync_module_states fsdp_transformer_layer_cls_to_wrap fsdp_use_orig_params fsdp_version gpu_ids
    gradient_accumulation_steps gradient_clipping help log_dir machine_rank main_process_ip main_process_port main_training_function
    max_restarts megatron_lm_attention_backend megatron_lm_attention_dropout megatron_lm_attention_softmax_in_fp32
    megatron_lm_calculate_per_token_loss megatron_lm_config megatron_lm_context_parallel_size
    megatron_lm_decoder_last_pipeline_num_layers megatron_lm_eod_mask_loss megatron_lm_expert_model_parallel_size
    megatron_lm_expert_tensor_parallel_size megatron_lm_gradient_clipping megatron_lm_hidden_dropout megatron_lm_no_load_optim
    megatron_lm_no_save_optim megatron_lm_num_micro_batches megatron_lm_optimizer_cpu_offload
    megatron_lm_overlap_cpu_optimizer_d2h_h2d megatron_lm_pp_degree megatron_lm_recompute_activations
    megatron_lm_recompute_granularity megatron_lm_recompute_method megatron_lm_recompute_num_layers megatron_lm_sequence_parallelism
    megatron_lm_tp_degree megatron_lm_use_custom_fsdp megatron_lm_use_distributed_optimizer
    megatron_lm_use_precision_aware_optimizer megatron_lm_use_rotary_position_embeddings mixed_precision module monitor_interval
    mpirun_config mpirun_hostfile multi_gpu no_python num_cpu_threads_per_process num_machines num_processes
    offload_optimizer_device offload_optimizer_nvme_path offload_param_device offload_param_nvme_path parallelism_config
    parallelism_config_cp_backend parallelism_config_cp_comm_strategy parallelism_config_cp_size
    parallelism_config_dp_replicate_size parallelism_config_dp_shard_size parallelism_config_sp_attn_implementation
    parallelism_config_sp_backend parallelism_config_sp_seq_length parallelism_config_sp_seq_length_is_variable
    parallelism_config_sp_size parallelism_config_tp_size quiet rdzv_backend rdzv_conf role same_network tee tpu tpu_env tpu_name
    tpu_use_cluster tpu_use_sudo tpu_vm tpu_zone training_script training_script_args use_cpu use_deepspeed use_fsdp use_megatron_lm
    use_parallelism_config vm zero3_init_flag zero3_save_16bit_model zero_stage
"""
"""Options of `accelerate launch` and keys of its file."""
_ACCELERATE_OPTIONS = "h m no_tpu_cluster q t tpu_cluster"
"""Options of `accelerate launch` whose values have other names: -m is module, --tpu_cluster is tpu_use_cluster."""
_AXOLOTL = """
    accelerator_config activation_checkpointing activation_dtype activation_offloading adam_beta1 adam_beta2 adam_beta3 adam_epsilon
    adam_epsilon2 adapter adaptive_max_tokens added_tokens_overrides additional_special_tokens advantage_estimator alignment_coef
    api_key async_prefetch attn_implementation auto_find_batch_size auto_resume_from_checkpoints auto_wrap_policy
    axolotl_config_path backend base_model base_model_config base_url batch_flattening batch_size bench_dataset bench_split beta
    bf16 bfloat16 bnb_config_kwargs bos_token capabilities ce_coef center_rewards_coefficient chat_template chat_template_jinja
    chat_template_kwargs check_interval chosen_format chunked_cross_entropy chunked_cross_entropy_num_chunks cls_model_config
    comet_api_key comet_experiment_config comet_experiment_key comet_mode comet_online comet_project_name comet_workspace
    completion_format context_length context_parallel_size conversation cosine_constant_lr_ratio cosine_min_lr_ratio cpo_alpha
    cpu_offload_pin_memory cpu_ram_efficient_loading curriculum_sampling cut_cross_entropy data_files data_parallel_size
    dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor dataset_exact_deduplication
    dataset_keep_in_memory dataset_num_proc dataset_prepared_path dataset_processes dataset_shard_idx dataset_shard_num datasets ddp
    ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_timeout deepcompile deepspeed default_system_message
    dense_mixer device device_map diffusion dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of diversity_coef
    do_bench_eval do_causal_lm_eval dp_replicate_size dp_shard_size dpo_beta dpo_generate_during_eval dpo_label_smoothing
    dpo_loss_type dpo_loss_weights dpo_norm_loss dpo_padding_free dpo_use_liger_kernel dpo_use_logits_to_keep dpo_use_weighting
    drop_system_message ds_type dsv4_bf16_all dsv4_fp4_grouped_mode dsv4_fp8_lora_kernel dsv4_fp8_nonexpert_mode
    dsv4_shared_mlp_lora_kernel dtype dynamic_checkpoint eaft_alpha eaft_k eager_attention early_stopping_patience ebft embed_method
    embedding_lr embedding_lr_scale embeddings_skip_upcast enable_prefix_caching enable_reasoning enabled end enforce_eager
    entropy_coef entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target env_capabilities eos_token eot_tokens eps
    epsilon epsilon_high eval_batch_size eval_causal_lm_metrics eval_max_new_tokens eval_sample_packing eval_sequence_len eval_steps
    eval_strategy eval_table_size evals_per_epoch evaluation_strategy excess_length_strategy experimental_skip_move_to_device
    expert_backend expert_parallel_backend expert_parallel_fallback_on_unsupported expert_parallel_num_nvl_bytes
    expert_parallel_num_rdma_bytes expert_parallel_size expert_parallel_token_capacity experts_implementation
    fake_quant_after_n_steps feature_layers field field_chosen field_completion field_human field_input field_instruction
    field_label field_messages field_model field_output field_prompt field_rejected field_system field_thinking field_tools
    final_state_dict_type fix_untrained_tokens flash_attention flash_attn_cross_entropy flash_attn_d512 flash_attn_fuse_mlp
    flash_attn_rms_norm flash_optimum flex_attention flex_attn_compile_kwargs float16 float32 format fp16 fp32_norm_classes
    fp32_norms fp8 fp8_config fp8_enable_fsdp_float8_all_gather freeze_mm_modules fsdp fsdp_config fsdp_final_state_dict_type
    fsdp_version fused_attn_kernel future_timeout gc_collect_steps gc_steps gemma4_fp8_nonexpert gemma4_hybrid_attn_impl
    gemma4_nf4_nonexpert generate_max_len generate_samples generation_batch_size generation_do_sample generation_interval
    generation_kwargs generation_max_length generation_max_new_tokens generation_prompt_ratio generation_steps
    generation_temperature generation_top_k generation_top_p gptq gpu_memory_limit gpu_memory_utilization
    gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_kwargs gradio_max_new_tokens gradio_server_name
    gradio_server_port gradio_share gradio_temperature gradio_title greater_is_better grokfast_alpha grokfast_lamb group_by_length
    group_size gt_length_multiplier hatchery heads_k_stride hf_mlflow_log_artifacts hf_use_auth_token host hub_model_id hub_revision
    hub_strategy image_resize_algorithm image_size importance_sampling_level importance_weighting include_end include_start
    include_tkps include_tokens_per_second input_format input_transform is_falcon_derived_model is_llama_derived_model
    is_mistral_derived_model is_preprocess is_qwen_derived_model jagged_restart_anneal_steps jagged_restart_steps
    jagged_restart_warmup_steps kd_alpha kd_beta kd_ce_alpha kd_normalize_topk kd_online_server kd_online_server_base_url
    kd_online_timeout kd_online_topk kd_temperature kd_temperature_min kd_trainer kto_desirable_weight kto_undesirable_weight
    large_head_attention layer_offloading learning_rate length liger_cross_entropy liger_fused_linear_cross_entropy
    liger_glu_activation liger_kernel_impl liger_layer_norm liger_rms_norm liger_rms_norm_gated liger_rope liger_swiglu
    liger_use_token_scaling lisa_layers_attribute lisa_n_layers lisa_step_interval llama4_linearized_experts llmcompressor
    lm_eval_batch_size lm_eval_model lm_eval_post_train lm_eval_tasks load_best_model_at_end load_in_4bit load_in_8bit local_rank
    loftq_bits loftq_config log_completions log_multimodal logging_steps logprobs_field lora_alpha lora_alpha_pattern lora_dropout
    lora_embedding_kernel lora_fan_in_fan_out lora_mlp_kernel lora_model_dir lora_modules_to_save lora_o_kernel lora_on_cpu
    lora_qkv_kernel lora_r lora_rank lora_rank_pattern lora_target_linear lora_target_modules lora_target_parameters
    loraplus_lr_embedding loraplus_lr_ratio loss_fn loss_fn_config loss_type loss_watchdog_patience loss_watchdog_threshold
    low_cpu_mem_usage lr lr_div_factor lr_groups lr_quadratic_warmup lr_scheduler lr_scheduler_kwargs mask_token_id mask_token_str
    mask_truncated_completions max_completion_length max_grad_norm max_input_id max_mask_ratio max_memory max_model_len
    max_packed_sequence_len max_prompt_len max_sample_tokens max_steps mean_resizing_embeddings merge_lora merge_method
    message_field_content message_field_role message_field_training message_field_training_detail message_property_mappings
    metric_for_best_model micro_batch_size min_completion_prefix min_input_id min_mask_ratio min_num_params min_p min_sample_len
    mixed_precision_policy mlflow_experiment_name mlflow_run_name mlflow_tracking_uri mode model_config model_kwargs
    model_quantization_config model_quantization_config_kwargs model_revision model_type modules moe_bnb_fast moe_dequant_chunk_size
    moe_grouped_backend mora mora_type multi_objective_aggregation multipack_real_batches n_samples_per_prompt name
    neftune_noise_alpha nemo_gym_auto_clone nemo_gym_auto_start nemo_gym_config_paths nemo_gym_datasets nemo_gym_dir
    nemo_gym_enabled nemo_gym_head_port nemo_gym_max_turns nemo_gym_model_name nemo_gym_multi_turn nemo_gym_run_timeout
    nemo_gym_server_timeout nemo_gym_verify_timeout no_input_format noise_schedule noisy_embedding_alpha nonexpert_quantization
    num_completions_to_print num_dataset_shards_to_save num_diffusion_steps num_epochs num_generation_samples num_generations
    num_iterations num_labels num_samples nvfp4_merge_aware nvfp4_merge_aware_start_step off_policy_mask_threshold offload
    offload_params optim_args optim_target_modules optimizer orpo_alpha otel_metrics_host otel_metrics_port output_dir
    overrides_of_model_config overrides_of_model_kwargs pad_to_multiple_of pad_to_sequence_len pad_token path peft
    peft_autocast_adapter_dtype peft_ensure_weight_tying peft_init_lora_weights peft_layer_replication peft_layers_pattern
    peft_layers_to_transform peft_trainable_token_indices peft_use_dora peft_use_rslora pipeline ple_cpu_offload plugins port
    pose_max_context_len pose_num_chunks pose_split_on_token_ids precompute_ref_log_probs prefetch_depth preprocess_iterable
    preprocess_shards pretrain_multipack_attn pretrain_multipack_buffer_size pretraining_dataset pretraining_sample_concatenation
    process_reward_model processor_kwargs processor_type profiler_steps profiler_steps_start project_id prompt_format
    push_dataset_to_hub qat qgalore_cos_threshold qgalore_gamma_proj qgalore_proj_bits qgalore_proj_group_size qgalore_proj_quant
    qgalore_proj_type qgalore_queue_size qgalore_rank qgalore_scale qgalore_update_proj_gap qlora_sharded_model_loading quantization
    quantize_embedding quantize_moe_experts ray_num_workers ray_run_name reasoning_parser recipe recompute_layer_types
    ref_model_mixup_alpha ref_model_sync_steps reinit_weights rejected_format relora relora_cpu_offload relora_prune_method
    relora_prune_ratio remove_unused_columns repetition_penalty replay_buffer_size replay_recompute_logps reroll_max_groups
    reroll_start_fraction reshard_after_forward resize_token_embeddings_to_32x resources_per_worker resume_from_checkpoint revision
    revision_of_model reward_funcs reward_model reward_num_workers reward_weights ring_attn_func rl rl_beta rl_coef role
    role_boundaries roles roles_to_train rollout_func rope_scaling rpo_alpha s2_attention sage_attention sample_packing
    sample_packing_bin_size sample_packing_eff_est sample_packing_group_size sample_packing_mp_start_method
    sample_packing_sequentially sample_temperature save save_compressed save_first_step save_name_prefix save_only_model
    save_safetensors save_sliding_window save_steps save_strategy save_total_limit saves_per_epoch scale_rewards scaling_softmax
    scaling_softmax_bias scaling_softmax_factor sdp_attention sdpa_varlen seed selective_checkpointing sequence_len sequence_length
    sequence_parallel_degree serve_module shards shards_idx shrink_embeddings shuffle_before_merging_datasets
    shuffle_merged_datasets simpo_gamma skip skip_prepare_dataset skip_zero_advantage_batches special_tokens spectrum_model_name
    spectrum_top_fraction split split_thinking start state_dict_type step_separator streaming streaming_min_groups
    streaming_multipack_buffer_size streaming_partial_batch strict stride swanlab_api_host swanlab_api_key
    swanlab_completion_log_interval swanlab_completion_max_buffer swanlab_description swanlab_experiment_name swanlab_lark_secret
    swanlab_lark_webhook_url swanlab_log_completions swanlab_log_model swanlab_mode swanlab_project swanlab_web_host
    swanlab_workspace sync_module_states sync_ref_model system_format system_prompt temperature template_thinking_key
    tensor_parallel_size test_datasets text_column tf32 tiled_mlp tiled_mlp_num_shards tiled_mlp_use_original_mlp tokenizer_config
    tokenizer_legacy tokenizer_save_jinja_files tokenizer_type tokenizer_use_fast tokenizer_use_mistral_common tokens top_k top_p
    torch_compile torch_compile_backend torch_compile_mode torch_compile_options torch_empty_cache_steps torchdistx_path
    total_num_tokens total_supervised_tokens trackio_project_name trackio_run_name trackio_space_id train_attn train_mlp
    train_on_eos train_on_eot train_on_inputs train_on_last_step_only train_unembed trainer_cls transformer_layer_cls_to_wrap
    trigger_file_path trl trust_remote_code type type_of_model unfrozen_parameters unk_token use_adaptive_entropy
    use_bias_correction_kl use_comet use_data_producer use_dsv4_kernels use_eaft use_glm_dsa_kernels use_kernels use_liger_loss
    use_mlflow use_mora use_onebitllms use_orig_params use_otel_metrics use_pose use_ray use_scattermoe use_sonicmoe use_swanlab
    use_tensorboard use_trackio use_vllm use_wandb use_whitening val_set_size vllm vllm_enable_sleep_mode vllm_guided_decoding_regex
    vllm_importance_sampling_cap vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
    vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_lora_sync vllm_mode vllm_server_host vllm_server_port
    vllm_server_timeout vllm_sync_interval wandb_entity wandb_log_model wandb_mode wandb_name wandb_project wandb_run_id wandb_watch
    warmup_ratio warmup_steps weight_decay weight_dtype worker_extension_cls world_size xformers_attention
"""
"""Keys of axolotl's file and of its sections."""
_DEEPSPEED = """
    activation_checkpointing aio amp autotuning bf16 bfloat16 checkpoint comet comms_logger communication_data_type compile
    compression_training csv_monitor curriculum_learning data_efficiency data_parallel_size data_types dataloader_drop_last
    datastates_ckpt disable_allgather disable_python_gc dump_state eigenvalue elasticity expert_parallel flops_profiler fp16
    gradient_accumulation_steps gradient_allreduce_op gradient_clipping gradient_predivide_factor graph_harvesting hybrid_engine
    log_level managed_gradient_accumulation memory_breakdown nebula optimizer pipeline prescale_gradients progressive_layer_drop
    quantize_training scheduler seq_parallel_communication_data_type sequence_parallel_size sparse_attention sparse_gradients
    steps_per_print tensor_parallel tensorboard timers torch_autocast train_batch_size train_micro_batch_size_per_gpu
    use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb weight_quantization
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
"""
"""Keys that DeepSpeedConfig asks a configuration for, outside its sections. It does not report others."""

_TEXTS = {
    "accelerate": _ACCELERATE,
    "accelerate command": _ACCELERATE + _ACCELERATE_OPTIONS,
    "Trainer arguments": _TRAINER,
    "TRL": _TRAINER + _TRL,
    "axolotl": _AXOLOTL,
    "DeepSpeed": _DEEPSPEED,
}
_OF_FORMAT = {format: frozenset(names.split()) for format, names in _TEXTS.items()}


def known_keys(format: str) -> frozenset[str]:
    """The keys of files of this format; empty if they are not listed."""
    return _OF_FORMAT.get(format, frozenset())


def is_unknown(format: str, key: str) -> bool:
    """Whether the consumer of this format has no such key. False for formats whose keys are not listed, and for keys in sections.

    >>> is_unknown("Trainer arguments", "lora_enable"), is_unknown("Trainer arguments", "logging_steps")
    (True, False)
    """
    return format in _OF_FORMAT and "." not in key and key not in _OF_FORMAT[format]
