"""The client of the cache server: its public names. The modules inside are private."""

from remote_server.client.cache_client import (
    ABSENT_SO_FAR,
    UNANSWERED,
    UNANSWERED_LATE,
    CacheClient,
)
from remote_server.client.cache_requests import Anchors
from remote_server.client.config import ClientConfig
from remote_server.client.connection.breaker import BreakerState
from remote_server.client.io_thread import IoThread
from remote_server.client.remote_client import RemoteClient
from remote_server.client.results import GetOutcome, GetPart, GetResult, GetTimes, PutResult
from remote_server.shm.region import SharedRegion

__all__ = [
    "ABSENT_SO_FAR", "UNANSWERED", "UNANSWERED_LATE", "Anchors",
    "BreakerState", "CacheClient", "ClientConfig", "GetOutcome", "GetPart", "GetResult", "GetTimes",
    "IoThread", "PutResult", "RemoteClient", "SharedRegion",
]  # fmt: skip
