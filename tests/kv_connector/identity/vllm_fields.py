"""What becomes of each field of vLLM's config: the fact that covers it, or why none has to.

Fields in `config_facts.SETTINGS` stand there only. `*` is every other field of a class.
"""

ByName = dict[str, str]


def _by_name(names_of: dict[str, str]) -> ByName:
    """`names_of` has the names of each fact, or for each reason."""
    return {name: what for what, names in names_of.items() for name in names.split()}


# The fact in which a field is seen, where it is not a fact by its own name.
_SEEN_IN = {
    "VllmConfig": {"additional_config": "additional_config"},
    "ModelConfig": {
        "weights": "model model_weights revision",
        "runner": "runner convert",
        "remote_code": "trust_remote_code",
        "dtype": "dtype",
        "quantization": "quantization",
        "model_config": "hf_config hf_config_path hf_overrides config_format",
        "rope": "hf_text_config",
        "model_class": "model_impl",
        "max_model_len": "max_model_len",
    },
    "CacheConfig": {
        "kv_dtype": "cache_dtype",
        "layout": "kv_cache_layout",
        "hash_algo": "prefix_caching_hash_algo",
        "groups": "sliding_window mamba_page_size_padded skip_page_size_padded mamba_block_size",
    },
    "ParallelConfig": {
        "parallel": (
            "tensor_parallel_size pipeline_parallel_size prefill_context_parallel_size "
            "decode_context_parallel_size"
        )
    },
    "LoadConfig": {"loader": "load_format", "weights": "download_dir ignore_patterns"},
    "SpeculativeConfig": {
        "draft_weights": "model revision draft_load_config",
        "draft_config": "draft_model_config",
        "model_config": "target_model_config",
        "parallel": "target_parallel_config",
    },
    "MultiModalConfig": {"processor": "mm_encoder_fp8_scale_path"},
    "SchedulerConfig": {"groups": "disable_hybrid_kv_cache_manager", "runner": "runner_type"},
    "AttentionConfig": {"attention": "backend backend_per_kind"},
    "DeviceConfig": {"device": "*"},
    "KVTransferConfig": {"blocks_per_row": "kv_connector_extra_config"},
}
SEEN_IN: dict[str, ByName] = {kind: _by_name(each) for kind, each in _SEEN_IN.items()}

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

_HARMLESS = {
    "VllmConfig": {
        _DERIVED: "quant_config",
        "a name": "instance_id",
        _ROUNDING: "optimization_level",
        _SPEED: "performance_mode shutdown_timeout",
    },
    "ModelConfig": {
        _WORDS: (
            "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init renderer_num_workers "
            "io_processor_plugin enable_prompt_embeds"
        ),
        _AFTER: (
            "return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel enable_trace_replay "
            "logits_processors generation_config override_generation_config pooler_config"
        ),
        "sampling; weights that are random are never shared": "seed",
        _DERIVED: "is_submodel_config",
        "the output layer only": "word_embeddings_untied_by_checkpoint",
        "what may be read; the key is made of what was": (
            "allowed_local_media_path allowed_media_domains"
        ),
        "a limit on drafts": "spec_target_max_model_len",
        "a permission": "allow_deprecated_quantization hf_token",
        _ROUNDING: "enforce_eager",
        "has no effect": "disable_cascade_attn",
        "a name": "served_model_name",
        "a class of its own here": "multimodal_config",
        "weights come back as they were, or are updated, which starts a new weight epoch": (
            "enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend "
            "sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_cumem_allocator"
        ),
    },
    "CacheConfig": {
        _MEMORY: (
            "gpu_memory_utilization num_gpu_blocks_override kv_cache_memory_bytes "
            "enable_prefix_caching num_gpu_blocks num_cpu_blocks kv_cache_size_tokens "
            "kv_cache_max_concurrency kv_offloading_size kv_offloading_backend "
            "prefix_cache_retention_interval simple_cpu_offload_num_blocks"
        ),
        _DERIVED: (
            "user_specified_block_size is_attention_free effective_attention_block_size "
            "user_specified_mamba_block_size "
            "hash_block_size cache_hit_alignment_tokens _block_size_resolved"
        ),
    },
    "ParallelConfig": {
        _PLACES: (
            "data_parallel_size data_parallel_size_local data_parallel_rank "
            "data_parallel_rank_local data_parallel_master_ip dp_sync_interval "
            "data_parallel_rpc_port data_parallel_master_port data_parallel_backend "
            "data_parallel_external_lb data_parallel_hybrid_lb data_parallel_index "
            "max_parallel_loading_workers enable_shm_tensor_arena enable_elastic_ep "
            "elastic_ep_max_dp_size disable_nccl_for_dp_synchronization ray_workers_use_nsight "
            "ray_runtime_env placement_group distributed_executor_backend master_addr master_port "
            "node_rank nnodes numa_bind numa_bind_nodes numa_bind_cpus world_size rank "
            "assigned_physical_gpu_ids distributed_timeout_seconds cpu_distributed_timeout_seconds "
            "_data_parallel_master_port_list _coord_store_port _api_process_count "
            "_api_process_rank enable_fault_tolerance fault_tolerance_config"
        ),
        "the same sums in another order: " + _ROUNDING: (
            "is_moe_model enable_hc_sp enable_expert_parallel enable_eplb eplb_config "
            "expert_placement_strategy all2all_backend enable_ep_weight_filter enable_dbo "
            "ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold "
            "disable_custom_all_reduce dcp_comm_backend dcp_q_replicate "
            "enable_batch_sharded_sampling _allow_auto_resolve_cp_interleave_size"
        ),
        "methods for remote calls, beside the worker's own": "worker_extension_cls",
        "vLLM 0.31 reads it nowhere": "sd_worker_cls",
    },
    "SchedulerConfig": {
        "which tokens are computed when: " + _ROUNDING: (
            "max_num_batched_tokens max_num_scheduled_tokens max_num_seqs max_num_active_seqs "
            "long_prefill_token_threshold max_num_queued_reqs "
            "long_prefill_token_threshold_adaptive max_num_queued_tokens policy "
            "enable_chunked_prefill is_multimodal_model max_num_encoder_input_tokens "
            "encoder_cache_size disable_chunked_mm_input scheduler_cls watermark "
            "scheduler_reserve_full_isl prefill_schedule_interval async_scheduling stream_interval"
        )
    },
    "LoadConfig": {
        "how the same files are read": (
            "safetensors_prefetch_num_threads safetensors_prefetch_block_size device "
            "use_tqdm_on_load pt_load_map_location"
        )
    },
    "OffloadConfig": {"where weights wait": "*"},
    "EngramConfig": {"where a table of the model is kept": "*"},
    "AttentionConfig": {
        _ROUNDING: (
            "minimax_m3_msa_decode_backend flash_attn_version mla_prefill_backend "
            "flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv "
            "tq_max_kv_splits_for_cuda_graph sparse_mla_force_mqa "
            "sparse_mla_prefill_workspace_factor flex_attn_block_m flex_attn_block_n "
            "flex_attn_q_block_size flex_attn_kv_block_size trtllm_ragged_backend "
            "indexer_tp_shard_min_rows minimax_m3_indexer_cp"
        )
    },
    "MambaConfig": {_ROUNDING: "ssu_algorithm"},
    "KernelConfig": {
        _ROUNDING: (
            "ir_op_priority enable_flashinfer_autotune enable_cutedsl_warmup "
            "enable_rocm_segmented_attn_autotune enable_jit_warmup sparse_indexer_topk_backend "
            "monokernel"
        )
    },
    "CompilationConfig": {_ROUNDING: "*"},
    "LoRAConfig": {_LORA: "*"},
    "SpeculativeConfig": {
        _DRAFTS: (
            "prompt_lookup_max prompt_lookup_min suffix_decoding_max_tree_depth "
            "suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor "
            "suffix_decoding_min_token_prob rejection_sample_method synthetic_acceptance_rates "
            "synthetic_acceptance_length enable_adaptive_verification draft_sample_method "
            "dspark_draft_topk use_heterogeneous_vocab use_local_argmax_reduction fly_window_size "
            "fly_entropy_threshold fly_entropy_top_k xpress_topc draft_lm_head_quantization"
        ),
        "with a connector, hashes never look ahead": "disable_lookahead_block_hashes",
        _ROUNDING: "enforce_eager disable_padded_drafter_batch",
        "the workers name the backend of every layer, the draft's too": "attention_backend",
        "a name that only warns": "tensor_parallel_size",
        _DERIVED: "draft_parallel_config",
    },
    "MultiModalConfig": {
        _MEMORY: (
            "mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb "
            "mm_ipc_gpu_memory_gb"
        ),
        _ROUNDING: "mm_encoder_tp_mode mm_encoder_attn_backend",
        "what is written for a later start": (
            "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin"
        ),
        _WORDS: "interleave_mm_strings",
        _START: "skip_mm_profiling",
        _PLACES: "mm_tensor_ipc",
        "a check of requests": "allow_missing_mm_embeddings",
    },
    "ECTransferConfig": {
        _PLACES: "engine_id ec_buffer_device ec_buffer_size ec_ip ec_port ec_rank ec_parallel_size",
        _DERIVED: "mm_encoder_output_widths",
    },
    "KVTransferConfig": {_PLACES: "*"},
    "AuxOutputConfig": {_AFTER: "*"},
    "WatermarkConfig": {_AFTER: "*"},
    "StructuredOutputsConfig": {_AFTER: "*"},
    "ReasoningConfig": {_AFTER: "*"},
    "ObservabilityConfig": {_START: "*"},
    "LoggingConfig": {_START: "*"},
    "ProfilerConfig": {_START: "*"},
    "WatchdogConfig": {_START: "*"},
    "KVEventsConfig": {_PLACES: "*"},
    "EncoderCacheManagerConfig": {_MEMORY: "*"},
    "WeightTransferConfig": {"an update of the weights starts a new weight epoch": "*"},
}
HARMLESS: dict[str, ByName] = {kind: _by_name(each) for kind, each in _HARMLESS.items()}

# Not every supported vLLM has these: a class, or a class and its fields.
OF_SOME_VERSIONS: dict[str, set[str]] = {
    "AttentionConfig": {
        *("trtllm_ragged_backend", "indexer_tp_shard_min_rows", "minimax_m3_indexer_cp"),
        *("sparse_mla_prefill_workspace_factor", "tokenspeed_mla_min_split_kv"),
    },
    "CacheConfig": {
        *("simple_cpu_offload_num_blocks", "cache_hit_alignment_tokens", "hash_block_size"),
        "user_specified_mamba_block_size",
    },
    "ECTransferConfig": {"mm_encoder_output_widths", "ec_rank", "ec_parallel_size"},
    "KernelConfig": {"monokernel", "enable_rocm_segmented_attn_autotune"},
    "ModelConfig": {"sleep_mode_offload_cudagraph"},
    "ParallelConfig": {"enable_hc_sp", "enable_shm_tensor_arena", "sd_worker_cls"},
    "SpeculativeConfig": {
        *("fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k", "xpress_topc"),
        *("draft_lm_head_quantization", "disable_lookahead_block_hashes"),
    },
    "WatchdogConfig": set(),
}
VARIABLES_OF_SOME_VERSIONS = {
    *("VLLM_ROCM_MUSE_MOE_ONLINE_QUANT", "VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE"),
    *("VLLM_ROCM_USE_AITER_FP4_ASM_GEMM", "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4"),
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE",
}

# Variables whose names sound as if they changed values or layouts.
HARMLESS_VARIABLES = _by_name(
    {
        _ROUNDING: (
            "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE "
            "VLLM_ROCM_FP8_PADDING VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES "
            "VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD "
            "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB VLLM_XPU_INC_WNA16_BACKEND"
        ),
        "a wish; the layout that comes of it is a fact": "VLLM_KV_CACHE_LAYOUT",
        "the text of events": "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES",
        _PLACES: "VLLM_ELASTIC_EP_SCALE_UP_LAUNCH",
    }
)
