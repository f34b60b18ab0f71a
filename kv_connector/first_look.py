"""Once, when the server first answers: does it hold blocks of an engine that nearly is this one?

An engine that gets no hits because one setting differs from those that filled the server looks
healthy from everywhere. This says so, in its own log, in one line that names the setting.
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
    """Ask the server what it holds and log what keeps this engine from using it. Returns at once;
    the line comes on the client's thread. A server that does not answer is no news here."""

    def say(reply: "Future[StatsReply]") -> None:
        if reply.cancelled() or reply.exception() is not None:
            return
        for gap in gaps_of(namespace, engine, facts, reply.result().namespaces):
            logger.warning("%s", gap.line())

    client.stats(fingerprints=True, timeout_s=TIMEOUT_S).add_done_callback(say)
