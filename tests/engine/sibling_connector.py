"""A connector beside ours that has handshake metadata, as Nixl has, and accepts only its own.

It transfers nothing. It raises where it is given metadata of another class, or none.
"""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger

logger = init_logger("vllm.sibling")

GOT_ITS_OWN = "the sibling got its own handshake metadata"


@dataclass
class SiblingHandshake(KVConnectorHandshakeMetadata):
    address: str


@dataclass
class SiblingMetadata(KVConnectorMetadata):
    pass


@dataclass
class SiblingWorkerMetadata(KVConnectorWorkerMetadata):
    steps: int

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "SiblingWorkerMetadata":
        assert isinstance(other, SiblingWorkerMetadata)
        return SiblingWorkerMetadata(self.steps + other.steps)


class SiblingConnector(KVConnectorBase_V1, SupportsHMA):
    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return SiblingHandshake("tcp://127.0.0.1:1")

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        for rank, given in metadata.items():
            if not isinstance(given, SiblingHandshake):
                raise ValueError(f"worker {rank}: {type(given).__name__} is not of this connector")
        if not metadata:
            raise ValueError("no worker's metadata arrived")
        logger.info(GOT_ITS_OWN)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return SiblingMetadata()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(connector_metadata, SiblingMetadata), type(connector_metadata)
        super().bind_connector_metadata(connector_metadata)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return SiblingWorkerMetadata(1)

    def update_connector_output(self, connector_output: Any) -> None:
        given = connector_output.kv_connector_worker_meta
        assert given is None or isinstance(given, SiblingWorkerMetadata), type(given)

    # ── what vLLM wants of every connector ───────────────────────────────────────────────

    def start_load_kv(self, *_: Any, **__: Any) -> None: ...
    def wait_for_layer_load(self, *_: Any) -> None: ...
    def save_kv_layer(self, *_: Any, **__: Any) -> None: ...
    def wait_for_save(self) -> None: ...
    def register_kv_caches(self, *_: Any) -> None: ...
    def update_state_after_alloc(self, *_: Any) -> None: ...

    def get_num_new_matched_tokens(self, *_: Any) -> tuple[int | None, bool]:
        return 0, False

    def request_finished(self, *_: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def request_finished_all_groups(self, *_: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None
