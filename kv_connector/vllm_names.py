"""Every name of vLLM that kvferry uses and that vLLM may change, with what it is used for.

vLLM calls its connector and offloading interfaces experimental, and some of what is needed here
is private. A version that lacks one of these names cannot run kvferry; `vllm_support` finds them
in the source of a version without importing it.

A name is `Class`, `Class.member`, or `Class.method(parameter)`; members include what methods set
on `self`. A member is listed under the class that is used, wherever among its bases it is defined.
"""

_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector"
_OFFLOAD = "vllm.v1.kv_offload"

_HOOK = "a hook that vLLM calls on our connector"
_TIER_HOOK = "a hook that vLLM calls on a tier"
_FACT = "decides the bytes of a block: part of the namespace"
_GEOMETRY = "where the bytes of a row are"
_JOB = "what a tier is given to move, and answers"
_METRIC = "how a tier shows its metrics"
_TYPE = "named in annotations only"

NAMES: dict[str, dict[str, str]] = {
    # ── finding and building the connector ──────────────────────────────────────────────
    f"{_CONNECTOR}.factory": {
        "KVConnectorFactory.register_connector": "makes KVFerryConnector a short name",
    },
    f"{_CONNECTOR}.v1": {"KVConnectorRole": "tells scheduler and worker apart"},
    f"{_CONNECTOR}.v1.base": {
        "KVConnectorHandshakeMetadata": "base of what workers send the scheduler",
        "KVConnectorRole.WORKER": "tells scheduler and worker apart",
        "KVConnectorBase_V1._vllm_config": "the translated settings, in a worker's hooks",
    },
    f"{_CONNECTOR}.v1.offloading_connector": {
        "OffloadingConnector": "base of our connector",
        "OffloadingConnector.scheduler": "leads to the manager and its tiers",
        "OffloadingConnector.connector_worker": "leads to the spec, for the start-up canary",
        "OffloadingConnector.register_kv_caches": _HOOK,
        "OffloadingConnector.get_handshake_metadata": _HOOK,
        "OffloadingConnector.set_xfer_handshake_metadata_pp_aware": _HOOK,
        "OffloadingConnector.on_new_request": _HOOK,
        "OffloadingConnector.get_num_new_matched_tokens": _HOOK,
        "OffloadingConnector.update_state_after_alloc": _HOOK,
        "OffloadingConnector.build_connector_meta": _HOOK,
        "OffloadingConnector.update_connector_output": _HOOK,
        "OffloadingConnector.requires_piecewise_for_cudagraph": _HOOK,
        "OffloadingConnector.build_prom_metrics": _HOOK,
        "OffloadingConnector.get_external_cache_hit_sources": "tokens by level, for the log line",
    },
    f"{_CONNECTOR}.v1.offloading.scheduler": {
        "OffloadingConnectorScheduler.manager": "leads to the tiers, ours among them",
        "OffloadingConnectorScheduler.config": "the groups of the KV cache",
        "OffloadingConnectorScheduler._req_status": "the keys of a request's prefix",
        "SchedulerOffloadConfig.kv_group_configs": "the groups of the KV cache",
        "GroupOffloadConfig.tokens_per_chunk": "which keys a prefix of so many tokens has",
        "GroupOffloadConfig.sliding_window_size_in_chunks": "groups that hold all of a prefix",
        "RequestOffloadState.group_states": "the keys of a request's prefix",
        "RequestGroupState.offload_keys": "the keys of a request's prefix",
    },
    f"{_CONNECTOR}.v1.offloading.worker": {
        "OffloadingConnectorWorker.spec": "makes the stage of the start-up canary",
    },
    f"{_CONNECTOR}.v1.offloading.metrics": {
        "OffloadingConnectorStats": _METRIC,
        "OffloadingConnectorStats.increase_counter": _METRIC,
        "OffloadingConnectorStats.observe_histogram": _METRIC,
        "OffloadingConnectorStats.set_gauge": _METRIC,
    },
    f"{_CONNECTOR}.v1.metrics": {
        "KVConnectorPromMetrics": _TYPE,
        "PromMetric": _TYPE,
        "PromMetricT": _TYPE,
    },
    # ── the offloading spec and its pool ────────────────────────────────────────────────
    f"{_OFFLOAD}.tiering.spec": {
        "TieringOffloadingSpec": "base of our spec",
        "TieringOffloadingSpec.get_manager": "wrapped, to offer the pool's file before it",
        "TieringOffloadingSpec.create_worker": "the worker on a GPU",
        "TieringOffloadingSpec.get_worker": "replaced: it refuses the CPU platform",
        "TieringOffloadingSpec._scheduler_mmap": "the pool as shared memory, for the tier",
        "TieringOffloadingSpec._engine_id": "names the pool's file; ours replaces it",
        "TieringOffloadingSpec._worker": "the worker made once",
        "TieringOffloadingSpec.config": "parallel sizes and identity",
        "TieringOffloadingSpec.extra_config": "the settings, as translated",
        "TieringOffloadingSpec.num_chunks": _GEOMETRY,
        "TieringOffloadingSpec.kv_bytes_per_chunk": _GEOMETRY,
        "TieringOffloadingSpec.cpu_page_size_per_worker": _GEOMETRY,
        "TieringOffloadingSpec.replicated_layout": _GEOMETRY,
        "TieringOffloadingSpec.blocks_per_chunk": _GEOMETRY,
        "TieringOffloadingSpec.tokens_per_block": _GEOMETRY,
    },
    f"{_OFFLOAD}.tiering.manager": {
        "TieringOffloadingManager.primary_tier": "leads to the pool's file",
        "TieringOffloadingManager.secondary_tiers": "our tier is looked for in it",
        "CPUPrimaryTierOffloadingManager._mmap_region": "the pool's file, whose name is removed",
    },
    f"{_OFFLOAD}.cpu.gpu_worker": {
        "CPUOffloadingWorker._mmap_region": "the worker's map of the pool, for the canary",
    },
    f"{_OFFLOAD}.cpu.shared_offload_region": {
        "SharedOffloadRegion.__init__(engine_id)": "names the pool's file",
        "SharedOffloadRegion.__init__(num_chunks)": _GEOMETRY,
        "SharedOffloadRegion.__init__(rank)": _GEOMETRY,
        "SharedOffloadRegion.__init__(kv_bytes_per_chunk)": _GEOMETRY,
        "SharedOffloadRegion.__init__(cpu_page_size)": _GEOMETRY,
        "SharedOffloadRegion.mmap_path": "the file's name, removed once all have mapped it",
        "SharedOffloadRegion.fd": "the file, which the cache server maps",
        "SharedOffloadRegion.base_tensor": "all of the pool",
        "SharedOffloadRegion.create_next_worker_view": "a layer's part of the rows",
        "SharedOffloadRegion.cleanup": "lets go of the pool",
    },
    f"{_OFFLOAD}.cpu.common": {"CPULoadStoreSpec": "rows, for the canary's copies"},
    # ── blocks, workers, requests ───────────────────────────────────────────────────────
    f"{_OFFLOAD}.base": {
        "OffloadingSpec": _TYPE,
        "OffloadingManager": _TYPE,
        "OffloadingWorker": "base of the worker for the CPU platform",
        "OffloadingWorker.submit_store": "copies engine blocks to rows",
        "OffloadingWorker.submit_load": "copies rows to engine blocks",
        "OffloadingWorker.get_finished": "ends copies",
        "OffloadingWorker.wait": "ends copies",
        "OffloadingWorker.shutdown": "ends the copying thread",
        "TransferResult": "ends copies",
        "TransferResult.transfer_size": "ends copies",
        "TransferResult.transfer_time": "ends copies",
        "LoadStoreSpec": _TYPE,
        "BlockIDsLoadStoreSpec.block_ids": "rows of a copy",
        "GPULoadStoreSpec.group_sizes": "engine blocks of a copy, by group",
        "GPULoadStoreSpec.block_indices": "where in its first row a group begins",
        "CanonicalKVCaches.tensors": _GEOMETRY,
        "CanonicalKVCaches.group_data_refs": _GEOMETRY,
        "CanonicalKVCacheTensor.tensor": _GEOMETRY,
        "CanonicalKVCacheTensor.page_size_bytes": _GEOMETRY,
        "CanonicalKVCacheRef.tensor_idx": _GEOMETRY,
        "CanonicalKVCacheRef.page_size_bytes": _GEOMETRY,
        "OffloadKey": "names a block",
        "ReqContext.req_id": "whose lookup it is",
        "ReqContext.kv_transfer_params": "what a request may use",
        "ReqContext.load_tier_filter": "keeps backfill to the pool",
        "ReqContext.get_offload_key_position": "how deep in its prompt a key is",
        "TierFilter": "keeps backfill to the pool",
        "LookupResult.HIT": "the answer to a lookup",
        "LookupResult.MISS": "the answer to a lookup",
        "LookupResult.RETRY": "the answer to a lookup",
        "Locality.REMOTE": "where our tier is",
        "RequestOffloadingContext": _TIER_HOOK,
        "ScheduleEndContext.new_req_ids": "which requests were admitted",
        "ScheduleEndContext.preempted_req_ids": "which requests are looked up anew",
        "OffloadingMetricMetadata": _METRIC,
        "OffloadingCounterMetadata": _METRIC,
        "OffloadingGaugeMetadata": _METRIC,
        "OffloadingHistogramMetadata.buckets": _METRIC,
    },
    f"{_OFFLOAD}.tiering.base": {
        "SecondaryTierManager.__init__(offloading_spec)": "how vLLM makes our tier",
        "SecondaryTierManager.__init__(primary_kv_view)": "how vLLM makes our tier",
        "SecondaryTierManager.__init__(tier_type)": "how vLLM makes our tier",
        "SecondaryTierManager.__init__(backpressure_detector)": "how vLLM makes our tier",
        "SecondaryTierManager.cache_hit_source": "what hits of our tier count as",
        "SecondaryTierManager.locality": "where our tier is",
        "SecondaryTierManager.build_metric_definitions": _METRIC,
        "SecondaryTierManager.get_stats": _METRIC,
        "SecondaryTierManager.on_new_request": _TIER_HOOK,
        "SecondaryTierManager.lookup": _TIER_HOOK,
        "SecondaryTierManager.on_schedule_end": _TIER_HOOK,
        "SecondaryTierManager.on_request_finished": _TIER_HOOK,
        "SecondaryTierManager.submit_load": _TIER_HOOK,
        "SecondaryTierManager.submit_store": _TIER_HOOK,
        "SecondaryTierManager.get_finished_jobs": _TIER_HOOK,
        "SecondaryTierManager.serve_external_requests": _TIER_HOOK,
        "SecondaryTierManager.has_pending_work": _TIER_HOOK,
        "SecondaryTierManager.drain_jobs": _TIER_HOOK,
        "SecondaryTierManager.touch": _TIER_HOOK,
        "SecondaryTierManager.shutdown": _TIER_HOOK,
        "ParentManager.on_new_request": "begins a batch of backfill",
        "ParentManager.lookup": "begins a batch of backfill",
        "ParentManager.create_store_job": "begins a batch of backfill",
        "ParentManager.on_request_finished": "ends a batch of backfill",
        "TransferJob.job_id": _JOB,
        "TransferJob.keys": _JOB,
        "TransferJob.chunk_ids": _JOB,
        "TransferJob.req_context": _JOB,
        "JobResult.successful_keys": _JOB,
        "JobResult.transfer_time": _JOB,
        "JobResult.transfer_bytes": _JOB,
    },
    f"{_OFFLOAD}.tiering.backpressure": {"BackpressureDetector": _TYPE},
    f"{_OFFLOAD}.config": {
        "OffloadingConfig.engine_id": "the engine's name on the server",
        "OffloadingConfig.groups": _FACT,
        "OffloadingConfig.model": _FACT,
        "OffloadingConfig.cache": _FACT,
        "OffloadingConfig.parallel": _FACT,
        "OffloadingConfig.worker_kv_bytes_per_block": _FACT,
        "OffloadingConfig.canonical_layout": _FACT,
        "OffloadingConfig.kv_cache_layout": _FACT,
        "OffloadingCacheConfig.blocks_per_chunk": _FACT,
        "OffloadingCacheConfig.tokens_per_hash": _FACT,
        "OffloadingGroupConfig.layer_names": _FACT,
        "OffloadingParallelConfig.rank": _GEOMETRY,
        "OffloadingParallelConfig.world_size": _GEOMETRY,
        "OffloadingParallelConfig.dcp_size": _FACT,
    },
    "vllm.v1.metrics.cache_hit_source": {
        "CacheHitSource.EXTERNAL_UNSPECIFIED": "what hits of our tier count as",
    },
    # ── the engine around it ────────────────────────────────────────────────────────────
    "vllm.config": {
        "VllmConfig.kv_transfer_config": "our settings",
        "VllmConfig.compilation_config": _FACT,
        "VllmConfig.instance_id": "the canary's name on the server",
        "CacheConfig.prefix_caching_hash_algo": _FACT,
        "ParallelConfig.distributed_executor_backend": "which process is the engine core",
        "ModelConfig.hf_text_config": _FACT,
        "LoadConfig.load_format": _FACT,
        "KVTransferConfig.kv_connector_extra_config": "our settings",
        "KVTransferConfig.engine_id": "part of the pool's name",
        "CompilationConfig.static_forward_context": _FACT,
    },
    "vllm.model_executor.model_loader": {
        "get_model_loader": "which files are the weights",
        "DefaultModelLoader._prepare_weights": "which files are the weights",
    },
    "vllm.v1.kv_cache_interface": {
        "KVCacheConfig.kv_cache_layout": _FACT,
        "KVCacheConfig.kv_cache_groups": _FACT,
    },
    "vllm.v1.core.kv_cache_manager": {"KVCacheBlocks": _TYPE},
    "vllm.v1.core.sched.output": {
        "SchedulerOutput.num_scheduled_tokens": "how fast the engine computes",
    },
    "vllm.v1.outputs": {"KVConnectorOutput": _TYPE},
    "vllm.v1.request": {
        "Request.kv_transfer_params": "what a request may use",
        "Request.lora_request": "a request with an adapter keeps to the pool",
        "Request.num_tokens": "the log line",
    },
    "vllm.platforms": {"current_platform": "whether there is a GPU"},
    "vllm.logger": {"init_logger": "our log lines among vLLM's"},
}
