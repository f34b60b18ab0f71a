"""Every name of vLLM that kvferry uses and that vLLM may change, each with its use.

vLLM declares its connector and offloading interfaces experimental, and some of these names are
private. A version that lacks one of them cannot run kvferry; `support` finds them in the
source of a version without importing it.

A name is `Class`, `Class.member`, or `Class.method(parameter)`; members include attributes that
methods set on `self`. A member is listed under the class that is used, even if a base defines it.

In the table below a line without indentation is a module. Each line under it has names, a colon and
their use, or the key of `USES`. A name that begins with a dot is of the class before it. A `?`
begins a line of names without which kvferry runs, with less: some version in use lacks them.
"""

USES = {
    "HOOK": "a hook that vLLM calls on our connector",
    "TIER_HOOK": "a hook that vLLM calls on a tier",
    "MADE": "the arguments with which vLLM makes our tier",
    "FACT": "decides the bytes of a block: part of the namespace",
    "GEOMETRY": "the position of the bytes of a row",
    "JOB": "the transfer jobs of a tier, and their results",
    "METRIC": "the metrics of a tier",
    "OLD": "engine blocks with KV from before a reset",
    "EVENT": "events of the servers' blocks for routers",
    "FLUSH": "copies that were under way at a reset",
    "WHOLE": "models that compute every token of a prompt, which are refused",
    "WATCH": "the weights of a running worker",
    "TYPE": "used in annotations only",
}
"""Uses of many names."""

TABLE = """
# ── finding and building the connector ──────────────────────────────────────────────
vllm.distributed.kv_transfer.kv_connector.factory
    KVConnectorFactory.register_connector: makes KVFerryConnector a short name
vllm.distributed.kv_transfer.kv_connector.v1
    KVConnectorRole: distinguishes scheduler and worker
vllm.distributed.kv_transfer.kv_connector.v1.base
    KVConnectorHandshakeMetadata KVConnectorMetadata KVConnectorWorkerMetadata: TYPE
    KVConnectorRole.WORKER: distinguishes scheduler and worker
vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector
    OffloadingConnector: base of our connector
    OffloadingConnector.scheduler: leads to the manager and its tiers
    OffloadingConnector.connector_worker: leads to the spec, for the canary
    OffloadingConnector.register_kv_caches .set_xfer_handshake_metadata_pp_aware: HOOK
    OffloadingConnector.on_new_request .get_num_new_matched_tokens .update_state_after_alloc: HOOK
    OffloadingConnector.bind_gpu_block_pool: OLD
    OffloadingConnector.build_connector_meta .update_connector_output .reset_cache: HOOK
    OffloadingConnector.bind_connector_metadata .build_connector_worker_meta: HOOK
    OffloadingConnector.requires_piecewise_for_cudagraph .build_prom_metrics: HOOK
    OffloadingConnector.get_required_kvcache_layout: HOOK
    ?OffloadingConnector.get_external_cache_hit_sources: tokens by level
vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler
    OffloadingConnectorScheduler.manager: leads to the tiers, ours among them
    OffloadingConnectorScheduler.config: the groups of the KV cache
    SchedulerOffloadConfig.num_workers: the number of workers that report
    OffloadingConnectorScheduler._req_status: the keys and limits of a request
    OffloadingConnectorScheduler._jobs ._current_batch_jobs_to_flush: FLUSH
    TransferJobStatus.pending_count: FLUSH
    SchedulerOffloadConfig.kv_group_configs: the groups of the KV cache
    SchedulerOffloadConfig.tokens_per_hash: how keys are made, for routers
    GroupOffloadConfig.group_idx .tokens_per_block: OLD
    RequestOffloadState.req: the requests that run at a reset
    RequestOffloadState.max_load_tokens .max_offload_tokens: keeps a request from the pool
    GroupOffloadConfig.tokens_per_chunk: the keys of a prefix, by its tokens
    GroupOffloadConfig.sliding_window_size_in_chunks: groups that hold all of a prefix
    GroupOffloadConfig.is_eagle_group: how many rows of a window a hit needs
    RequestOffloadState.group_states: the keys of a request's prefix
    RequestOffloadState.num_locally_computed_tokens: tokens by level
    ?RequestOffloadState.load_key_ranges: tokens by level
    RequestGroupState.offload_keys: the keys of a request's prefix
vllm.distributed.kv_transfer.kv_connector.v1.offloading.config
    get_offloading_group_ids: GEOMETRY
vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker
    OffloadingConnectorWorker.spec: makes the fixture of the canary
vllm.distributed.kv_transfer.kv_connector.v1.offloading.common
    OffloadingWorkerMetadata.completed_jobs: FLUSH
    OffloadingConnectorMetadata: carries acknowledgements to the workers
    OffloadingWorkerMetadata: carries the workers' reports to the scheduler
    OffloadingWorkerMetadata.aggregate: joins the steps of all workers
vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics
    OffloadingConnectorStats: METRIC
    OffloadingConnectorStats.increase_counter .observe_histogram .set_gauge: METRIC
vllm.distributed.kv_transfer.kv_connector.v1.metrics
    KVConnectorPromMetrics PromMetric PromMetricT: TYPE
# ── the offloading spec and its pool ────────────────────────────────────────────────
vllm.v1.kv_offload.tiering.spec
    TieringOffloadingSpec: base of our spec
    TieringOffloadingSpec.get_manager: wrapped, to check the pool before and after it
    TieringOffloadingSpec.create_worker: the worker on a GPU
    TieringOffloadingSpec.get_worker: replaced: it refuses the CPU platform
    TieringOffloadingSpec._scheduler_mmap: the pool as shared memory, for the tier
    TieringOffloadingSpec._engine_id: names the pool's file; ours replaces it
    TieringOffloadingSpec.config: parallel sizes and identity
    TieringOffloadingSpec.extra_config: the settings, as translated
    TieringOffloadingSpec.num_chunks .kv_bytes_per_chunk .cpu_page_size_per_worker: GEOMETRY
    TieringOffloadingSpec.replicated_layout .blocks_per_chunk .tokens_per_block: GEOMETRY
vllm.v1.kv_offload.tiering.manager
    TieringOffloadingManager.primary_tier: leads to the pool's file
    TieringOffloadingManager.secondary_tiers: leads to our tier
    TieringOffloadingManager.shutdown: releases a pool that the workers do not share
    CPUPrimaryTierOffloadingManager._mmap_region: the pool's file, to compare
vllm.v1.kv_offload.cpu.gpu_worker
    CPUOffloadingWorker._mmap_region: the worker's mapping of the pool, for the canary
vllm.v1.kv_offload.cpu.shared_offload_region
    SharedOffloadRegion.__init__(engine_id): names the pool's file
    SharedOffloadRegion.__init__(num_chunks) .__init__(rank) .__init__(kv_bytes_per_chunk): GEOMETRY
    SharedOffloadRegion.__init__(cpu_page_size): GEOMETRY
    SharedOffloadRegion.fd: the file, which the cache server maps
    SharedOffloadRegion.base_tensor: all of the pool
    SharedOffloadRegion.create_next_worker_view: a layer's part of the rows
    SharedOffloadRegion.cleanup: releases the pool
vllm.v1.kv_offload.cpu.common
    CPULoadStoreSpec: rows, for the canary's copies
# ── blocks, workers, requests ───────────────────────────────────────────────────────
vllm.v1.kv_offload.base
    OffloadingSpec OffloadingManager LoadStoreSpec: TYPE
    ?OffloadingManager.lock .on_reset_flushed: lookups go on after a reset
    OffloadingWorker: base of the worker for the CPU platform
    OffloadingWorker.submit_store: copies engine blocks to rows
    OffloadingWorker.submit_load: copies rows to engine blocks
    ?OffloadingWorker.submit_load(expedited): loads within a step, `sync_load_budget_bytes`
    OffloadingWorker.get_finished .wait: ends copies
    OffloadingWorker.shutdown: ends the copying thread
    TransferResult: ends copies
    TransferResult.transfer_size .transfer_time: ends copies
    BlockIDsLoadStoreSpec.block_ids: rows of a copy
    GPULoadStoreSpec.group_sizes: engine blocks of a copy, by group
    GPULoadStoreSpec.block_indices: the place in its first row at which a group begins
    CanonicalKVCaches.tensors .group_data_refs: GEOMETRY
    CanonicalKVCacheTensor.tensor .page_size_bytes: GEOMETRY
    CanonicalKVCacheRef.tensor_idx .page_size_bytes .mapping: GEOMETRY
    CanonicalPageMapping.canonical_page_size_bytes: GEOMETRY
    OffloadKey: names a block
    get_offload_group_idx: the group of a key
    ReqContext.req_id: the request of a lookup
    ReqContext.kv_transfer_params: the options of a request
    ReqContext.load_tier_filter: limits backfill to the pool
    ReqContext.get_offload_key_position: the position of a key in its prompt
    ?ReqContext._offload_key_positions: the first row of each run of a prompt
    TierFilter: limits backfill to the pool
    LookupResult.HIT .MISS .RETRY: the result of a lookup
    Locality.REMOTE: the locality of our tier
    Medium.STORAGE: EVENT
    OffloadingEvent.keys .medium .removed .locality .ownership .removal_expected: EVENT
    OffloadingSpec.kv_events_config: EVENT
    OffloadingKVEventsConfig.enable_kv_cache_events: EVENT
    RequestOffloadingContext: TIER_HOOK
    ScheduleEndContext.new_req_ids: the requests that were admitted
    ScheduleEndContext.preempted_req_ids: the requests that are looked up again
    OffloadingMetricMetadata: METRIC
    OffloadingCounterMetadata: METRIC
    OffloadingGaugeMetadata: METRIC
    OffloadingHistogramMetadata.buckets: METRIC
vllm.v1.kv_offload.tiering.base
    SecondaryTierManager.__init__(offloading_spec) .__init__(primary_kv_view): MADE
    SecondaryTierManager.__init__(tier_type) .__init__(backpressure_detector): MADE
    ?SecondaryTierManager.cache_hit_source: the level of our tier's hits
    SecondaryTierManager.locality: the locality of our tier
    SecondaryTierManager.build_metric_definitions .get_stats: METRIC
    SecondaryTierManager.on_new_request .lookup .on_schedule_end .on_request_finished: TIER_HOOK
    SecondaryTierManager.submit_load .submit_store .get_finished_jobs: TIER_HOOK
    SecondaryTierManager.serve_external_requests .has_pending_work .drain_jobs .touch: TIER_HOOK
    SecondaryTierManager.shutdown .take_events: TIER_HOOK
    ?SecondaryTierManager.config_info_keys .config_info: the tier in `kv_offload_config_info`
    ParentManager.on_new_request .lookup .create_store_job: begins a batch of backfill
    ParentManager.on_request_finished: ends a batch of backfill
    TransferJob.job_id .keys .chunk_ids .req_context: JOB
    JobResult.successful_keys .transfer_time .transfer_bytes: JOB
vllm.v1.kv_offload.tiering.backpressure
    BackpressureDetector: TYPE
vllm.v1.kv_offload.config
    OffloadingConfig.engine_id: the engine's name on the server
    OffloadingConfig.groups .model .cache .parallel .worker_kv_bytes_per_block: FACT
    OffloadingConfig.canonical_layout .kv_cache_layout: FACT
    OffloadingCacheConfig.blocks_per_chunk .tokens_per_hash: FACT
    OffloadingGroupConfig.layer_names: FACT
    OffloadingGroupConfig.group_id: the group of a key
    OffloadingGroupConfig.tokens_per_block: the start of a key's tokens
    OffloadingParallelConfig.rank .world_size: GEOMETRY
    OffloadingParallelConfig.dcp_size: FACT
vllm.v1.metrics.cache_hit_source
    ?CacheHitSource.EXTERNAL_UNSPECIFIED .HOST: the levels of hits below the engine
    ?CacheHitSource.DEVICE: the level of tokens before a sliding window
# ── the engine around it ────────────────────────────────────────────────────────────
vllm.config
    VllmConfig.kv_transfer_config: our settings
    VllmConfig.kv_events_config: EVENT
    KVEventsConfig.enable_kv_cache_events: EVENT
    VllmConfig.compilation_config: FACT
    VllmConfig.instance_id: the canary's name on the server
    CacheConfig.prefix_caching_hash_algo: FACT
    ParallelConfig.distributed_executor_backend: the process of the engine core
    ParallelConfig.nnodes .nnodes_within_dp .use_ray: whether scheduler and workers can share a pool
    ParallelConfig.world_size: whether scheduler and workers can share a pool
    ParallelConfig.enable_eplb: WATCH
    VllmConfig.offload_config: WATCH
    ModelConfig.hf_text_config: FACT
    ModelConfig.use_mla .pooler_config .is_prefix_caching_supported: WHOLE
    SchedulerConfig.enable_chunked_prefill: WHOLE
    LoadConfig.load_format: FACT
    KVTransferConfig.kv_connector_extra_config: our settings
    KVTransferConfig.engine_id: part of the pool's name
    CompilationConfig.static_forward_context: FACT
vllm.model_executor.model_loader
    get_model_loader: the files of the weights
    DefaultModelLoader._prepare_weights: the files of the weights
vllm.v1.kv_cache_interface
    KVCacheConfig.kv_cache_layout .kv_cache_groups: FACT
    KVCacheConfig.num_blocks .hisparse_host_num_blocks: GEOMETRY
    KVCacheGroupSpec.layer_names .kv_cache_spec: GEOMETRY
    AttentionSpec.page_size_bytes .unpadded_page_size_bytes: GEOMETRY
    UniformTypeKVCacheSpecs.kv_cache_specs: GEOMETRY
    group_kernel_blocks: GEOMETRY
    iter_layer_specs: groups that keep only the end of a prefix
    FullAttentionSpec: groups that keep only the end of a prefix
vllm.lora.request
    LoRARequest.lora_name .lora_path: the adapter of a key
vllm.v1.worker.gpu_model_runner
    GPUModelRunner.get_model: WATCH
vllm.v1.worker.gpu.model_runner
    GPUModelRunner.get_model: WATCH
vllm.v1.core.kv_cache_manager
    KVCacheBlocks.get_block_ids: OLD
vllm.v1.core.block_pool
    BlockPool.blocks: OLD
vllm.v1.core.kv_cache_utils
    KVCacheBlock.block_id .block_hash .ref_cnt .is_null: OLD
    KVCacheBlockCopy.src_block_id .dst_block_id: OLD
vllm.v1.core.sched.output
    SchedulerOutput.scheduled_cached_reqs .kv_cache_block_copies .kv_connector_block_state: OLD
    SchedulerOutput.total_num_scheduled_tokens: whether the engine is awake in a step
    SchedulerOutput.finished_req_ids: requests that are no longer kept back
    CachedRequestData.req_ids .new_block_ids .resumed_req_ids: OLD
    KVConnectorBlockState.get_block_ids: OLD
    KVConnectorBlockState.boundary_state_offloads: stores beyond a request's limit
    SchedulerOutput.num_scheduled_tokens: the engine's speed
vllm.v1.outputs
    KVConnectorOutput: TYPE
vllm.v1.request
    Request.kv_transfer_params: the options of a request
    Request.lora_request: limits a request with an adapter to the pool
    Request.num_tokens: the log line
    Request.num_computed_tokens: the requests that run at a reset
vllm.v1.executor.uniproc_executor
    ExecutorWithExternalLauncher: whether scheduler and workers can share a pool
    UniProcExecutor: the process of the engine core
vllm.platforms
    current_platform: whether there is a GPU
vllm.logger
    init_logger: our log lines among vLLM's
"""


def _read(table: str) -> tuple[dict[str, dict[str, str]], frozenset[str]]:
    """By module, each name with its use; and in full, the names that may be missing."""
    modules: dict[str, dict[str, str]] = {}
    optional: set[str] = set()
    module = ""
    for line in filter(None, table.splitlines()):
        if not line.startswith((" ", "#")):
            module, names = line, modules.setdefault(line, {})
        elif line.startswith(" "):
            listed, _, use = line.strip().removeprefix("?").partition(": ")
            owner = ""
            for name in listed.split():
                if not name.startswith("."):
                    owner = name.partition(".")[0]
                whole = owner + name if name.startswith(".") else name
                names[whole] = USES.get(use, use)
                if line.strip().startswith("?"):
                    optional.add(f"{module}.{whole}")
    for module, names in modules.items():
        if all(f"{module}.{name}" in optional for name in names):
            optional.add(module)  # the whole of it may be missing
    return modules, frozenset(optional)


NAMES, OPTIONAL = _read(TABLE)
