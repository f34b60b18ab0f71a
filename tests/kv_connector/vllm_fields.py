"""What becomes of each field of vLLM's config: the fact that covers it, or why none has to.

Fields in `config_facts.SETTINGS` stand there only. `*` is every other field of a class.
"""

# The fact in which a field is seen, where it is not a fact by its own name.
SEEN_IN: dict[str, dict[str, str]] = {
    "VllmConfig": {"additional_config": "additional_config"},
    "ModelConfig": {
        "model": "weights",
        "model_weights": "weights",
        "revision": "weights",
        "runner": "runner",
        "convert": "runner",
        "trust_remote_code": "remote_code",
        "dtype": "dtype",
        "quantization": "quantization",
        "hf_config": "model_config",
        "hf_text_config": "rope",
        "hf_config_path": "model_config",
        "hf_overrides": "model_config",
        "config_format": "model_config",
        "model_impl": "model_class",
        "max_model_len": "max_model_len",
    },
    "CacheConfig": {
        "cache_dtype": "kv_dtype",
        "kv_cache_layout": "layout",
        "prefix_caching_hash_algo": "hash_algo",
        "sliding_window": "groups",
        "mamba_page_size_padded": "groups",
        "skip_page_size_padded": "groups",
        "mamba_block_size": "groups",
    },
    "ParallelConfig": {
        "tensor_parallel_size": "parallel",
        "pipeline_parallel_size": "parallel",
        "prefill_context_parallel_size": "parallel",
        "decode_context_parallel_size": "parallel",
    },
    "LoadConfig": {
        "load_format": "loader",
        "download_dir": "weights",
        "ignore_patterns": "weights",
    },
    "SpeculativeConfig": {
        "model": "draft_weights",
        "revision": "draft_weights",
        "draft_load_config": "draft_weights",
        "draft_model_config": "draft_config",
        "target_model_config": "model_config",
        "target_parallel_config": "parallel",
    },
    "MultiModalConfig": {"mm_encoder_fp8_scale_path": "processor"},
    "SchedulerConfig": {"disable_hybrid_kv_cache_manager": "groups", "runner_type": "runner"},
    "AttentionConfig": {"backend": "attention", "backend_per_kind": "attention"},
    "DeviceConfig": {"*": "device"},
    "KVTransferConfig": {"kv_connector_extra_config": "blocks_per_row"},
}

_ROUNDING = "another kernel for the same function: values differ in their last bits only"
_MEMORY = "how much is kept, not what"
_AFTER = "what happens to logits, after all KV is computed"
_WORDS = "text before it becomes tokens; a key is made of tokens"
_PLACES = "where processes run and how they talk"
_DERIVED = "follows from fields that are facts"
_SPEED = "when something is done, not what"
_LORA = "a request with an adapter keeps to the CPU pool"
_DRAFTS = "which drafts are proposed or accepted: KV is kept of accepted tokens only"
_START = "what is prepared at start, measured or logged"

HARMLESS: dict[str, dict[str, str]] = {
    "VllmConfig": {
        "quant_config": _DERIVED,
        "instance_id": "a name",
        "optimization_level": _ROUNDING,
        "performance_mode": _SPEED,
        "shutdown_timeout": _SPEED,
    },
    "ModelConfig": {
        **dict.fromkeys(("tokenizer", "tokenizer_mode", "tokenizer_revision"), _WORDS),
        **dict.fromkeys(("skip_tokenizer_init", "renderer_num_workers"), _WORDS),
        **dict.fromkeys(("io_processor_plugin", "enable_prompt_embeds"), _WORDS),
        **dict.fromkeys(("return_sampling_mask", "max_logprobs", "logprobs_mode"), _AFTER),
        **dict.fromkeys(("use_fp64_gumbel", "enable_trace_replay", "logits_processors"), _AFTER),
        **dict.fromkeys(("generation_config", "override_generation_config"), _AFTER),
        "pooler_config": _AFTER,
        "seed": "sampling; weights that are random are never shared",
        "is_submodel_config": _DERIVED,
        "word_embeddings_untied_by_checkpoint": "the output layer only",
        "allowed_local_media_path": "what may be read; the key is made of what was",
        "allowed_media_domains": "what may be read; the key is made of what was",
        "spec_target_max_model_len": "a limit on drafts",
        "allow_deprecated_quantization": "a permission",
        "enforce_eager": _ROUNDING,
        "disable_cascade_attn": "has no effect",
        "served_model_name": "a name",
        "hf_token": "a permission",
        "multimodal_config": "a class of its own here",
        **dict.fromkeys(
            (
                *("enable_sleep_mode", "sleep_preserve_parameter_names", "sleep_mode_backend"),
                *("sleep_mode_offload_cudagraph", "enable_nccl_comm_suspend"),
                "enable_cumem_allocator",
            ),
            "weights come back as they were, or are updated, which starts a new weight epoch",
        ),
    },
    "CacheConfig": {
        **dict.fromkeys(("gpu_memory_utilization", "num_gpu_blocks_override"), _MEMORY),
        **dict.fromkeys(("kv_cache_memory_bytes", "enable_prefix_caching"), _MEMORY),
        **dict.fromkeys(("num_gpu_blocks", "num_cpu_blocks", "kv_cache_size_tokens"), _MEMORY),
        **dict.fromkeys(("kv_cache_max_concurrency", "kv_offloading_size"), _MEMORY),
        **dict.fromkeys(("kv_offloading_backend", "prefix_cache_retention_interval"), _MEMORY),
        **dict.fromkeys(("user_specified_block_size", "is_attention_free"), _DERIVED),
        **dict.fromkeys(("effective_attention_block_size", "hash_block_size"), _DERIVED),
        **dict.fromkeys(("cache_hit_alignment_tokens", "_block_size_resolved"), _DERIVED),
    },
    "ParallelConfig": {
        **dict.fromkeys(
            (
                *("data_parallel_size", "data_parallel_size_local", "data_parallel_rank"),
                *("data_parallel_rank_local", "data_parallel_master_ip", "dp_sync_interval"),
                *("data_parallel_rpc_port", "data_parallel_master_port", "data_parallel_backend"),
                *("data_parallel_external_lb", "data_parallel_hybrid_lb", "data_parallel_index"),
                *("max_parallel_loading_workers", "enable_shm_tensor_arena", "enable_elastic_ep"),
                *("elastic_ep_max_dp_size", "disable_nccl_for_dp_synchronization"),
                *("ray_workers_use_nsight", "ray_runtime_env", "placement_group"),
                *("distributed_executor_backend", "master_addr", "master_port", "node_rank"),
                *("nnodes", "numa_bind", "numa_bind_nodes", "numa_bind_cpus", "world_size", "rank"),
                *("assigned_physical_gpu_ids", "distributed_timeout_seconds"),
                *("cpu_distributed_timeout_seconds", "_data_parallel_master_port_list"),
                *("_coord_store_port", "_api_process_count", "_api_process_rank"),
                *("enable_fault_tolerance", "fault_tolerance_config"),
            ),
            _PLACES,
        ),
        **dict.fromkeys(
            (
                *("is_moe_model", "enable_hc_sp", "enable_expert_parallel", "enable_eplb"),
                *("eplb_config", "expert_placement_strategy", "all2all_backend"),
                *("enable_ep_weight_filter", "enable_dbo", "ubatch_size"),
                *("dbo_decode_token_threshold", "dbo_prefill_token_threshold"),
                *("disable_custom_all_reduce", "dcp_comm_backend", "dcp_q_replicate"),
                *("enable_batch_sharded_sampling", "_allow_auto_resolve_cp_interleave_size"),
            ),
            "the same sums in another order: " + _ROUNDING,
        ),
        "worker_extension_cls": "methods for remote calls, beside the worker's own",
    },
    "SchedulerConfig": dict.fromkeys(
        (
            *("max_num_batched_tokens", "max_num_scheduled_tokens", "max_num_seqs"),
            *("max_num_active_seqs", "long_prefill_token_threshold", "max_num_queued_reqs"),
            *("long_prefill_token_threshold_adaptive", "max_num_queued_tokens", "policy"),
            *("enable_chunked_prefill", "is_multimodal_model", "max_num_encoder_input_tokens"),
            *("encoder_cache_size", "disable_chunked_mm_input", "scheduler_cls", "watermark"),
            *("scheduler_reserve_full_isl", "prefill_schedule_interval", "async_scheduling"),
            "stream_interval",
        ),
        "which tokens are computed when: " + _ROUNDING,
    ),
    "LoadConfig": dict.fromkeys(
        (
            *("safetensors_prefetch_num_threads", "safetensors_prefetch_block_size", "device"),
            *("use_tqdm_on_load", "pt_load_map_location"),
        ),
        "how the same files are read",
    ),
    "OffloadConfig": {"*": "where weights wait"},
    "EngramConfig": {"*": "where a table of the model is kept"},
    "AttentionConfig": dict.fromkeys(
        (
            *("minimax_m3_msa_decode_backend", "flash_attn_version", "mla_prefill_backend"),
            *("flash_attn_max_num_splits_for_cuda_graph", "tokenspeed_mla_min_split_kv"),
            *("tq_max_kv_splits_for_cuda_graph", "sparse_mla_force_mqa"),
            *("sparse_mla_prefill_workspace_factor", "flex_attn_block_m", "flex_attn_block_n"),
            *("flex_attn_q_block_size", "flex_attn_kv_block_size"),
        ),
        _ROUNDING,
    ),
    "MambaConfig": {"ssu_algorithm": _ROUNDING},
    "KernelConfig": dict.fromkeys(
        (
            *("ir_op_priority", "enable_flashinfer_autotune", "enable_cutedsl_warmup"),
            *("enable_rocm_segmented_attn_autotune", "enable_jit_warmup"),
            "sparse_indexer_topk_backend",
        ),
        _ROUNDING,
    ),
    "CompilationConfig": {"*": _ROUNDING},
    "LoRAConfig": {"*": _LORA},
    "SpeculativeConfig": {
        **dict.fromkeys(
            (
                *("prompt_lookup_max", "prompt_lookup_min", "suffix_decoding_max_tree_depth"),
                *("suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor"),
                *("suffix_decoding_min_token_prob", "rejection_sample_method"),
                *("synthetic_acceptance_rates", "synthetic_acceptance_length"),
                *("enable_adaptive_verification", "draft_sample_method", "dspark_draft_topk"),
                *("use_heterogeneous_vocab", "use_local_argmax_reduction"),
            ),
            _DRAFTS,
        ),
        "enforce_eager": _ROUNDING,
        "disable_padded_drafter_batch": _ROUNDING,
        "attention_backend": "the workers name the backend of every layer, the draft's too",
        "tensor_parallel_size": "a name that only warns",
        "draft_parallel_config": _DERIVED,
    },
    "MultiModalConfig": {
        **dict.fromkeys(("mm_processor_cache_gb", "mm_processor_cache_type"), _MEMORY),
        **dict.fromkeys(("mm_shm_cache_max_object_size_mb", "mm_ipc_gpu_memory_gb"), _MEMORY),
        **dict.fromkeys(("mm_encoder_tp_mode", "mm_encoder_attn_backend"), _ROUNDING),
        **dict.fromkeys(
            ("mm_encoder_fp8_scale_save_path", "mm_encoder_fp8_scale_save_margin"),
            "what is written for a later start",
        ),
        "interleave_mm_strings": _WORDS,
        "skip_mm_profiling": _START,
        "mm_tensor_ipc": _PLACES,
        "allow_missing_mm_embeddings": "a check of requests",
    },
    "ECTransferConfig": {
        **dict.fromkeys(("engine_id", "ec_buffer_device", "ec_buffer_size", "ec_ip"), _PLACES),
        "ec_port": _PLACES,
        "mm_encoder_output_widths": _DERIVED,
    },
    "KVTransferConfig": {"*": _PLACES},
    "AuxOutputConfig": {"*": _AFTER},
    "WatermarkConfig": {"*": _AFTER},
    "StructuredOutputsConfig": {"*": _AFTER},
    "ReasoningConfig": {"*": _AFTER},
    "ObservabilityConfig": {"*": _START},
    "LoggingConfig": {"*": _START},
    "ProfilerConfig": {"*": _START},
    "KVEventsConfig": {"*": _PLACES},
    "EncoderCacheManagerConfig": {"*": _MEMORY},
    "WeightTransferConfig": {"*": "an update of the weights starts a new weight epoch"},
}

# Variables whose names sound as if they changed values or layouts.
HARMLESS_VARIABLES: dict[str, str] = {
    **dict.fromkeys(
        (
            *("VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER", "VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE"),
            *("VLLM_ROCM_FP8_PADDING", "VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES"),
            *("VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD", "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD"),
            *("VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB", "VLLM_XPU_INC_WNA16_BACKEND"),
        ),
        _ROUNDING,
    ),
    "VLLM_KV_CACHE_LAYOUT": "a wish; the layout that comes of it is a fact",
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "the text of events",
    "VLLM_ELASTIC_EP_SCALE_UP_LAUNCH": _PLACES,
}
