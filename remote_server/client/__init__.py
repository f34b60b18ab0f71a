"""The client of the cache server: its public names. The modules inside are private."""

from remote_server.client.remote_client import RemoteClient
from remote_server.client.results import ClientConfig, GetOutcome, GetResult, GetTimes, PutResult
from remote_server.client.session import BreakerState
from remote_server.shm.region import SharedRegion

__all__ = [
    "BreakerState", "ClientConfig", "GetOutcome", "GetResult", "GetTimes", "PutResult",
    "RemoteClient", "SharedRegion",
]  # fmt: skip
