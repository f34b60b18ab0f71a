"""Mismatch check at the first reply of a server: namespaces that differ in few facts.

An engine that gets no hits, because one setting differs from the engines that filled the server,
looks healthy otherwise. The check logs one line that names the setting.
"""

import logging
from collections.abc import Mapping
from concurrent.futures import Future

from remote_server.client import RemoteClient
from remote_server.protocol import StatsReply
from remote_server.protocol.namespace_diff import gaps_of

TIMEOUT_S = 5.0


def look_for_gaps(
    client: RemoteClient,
    namespace: str,
    engine: str,
    facts: Mapping[str, str],
    logger: logging.Logger,
) -> None:
    """Query the server's namespaces, and log the facts that keep this engine from using them.
    Returns at once; the client's thread logs. A failed query is ignored."""

    def say(reply: "Future[StatsReply]") -> None:
        if reply.cancelled() or reply.exception() is not None:
            return
        for gap in gaps_of(namespace, engine, facts, reply.result().namespaces):
            logger.warning("%s", gap.line())

    client.stats(fingerprints=True, timeout_s=TIMEOUT_S).add_done_callback(say)
