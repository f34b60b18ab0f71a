"""The connection of a command to one server."""

import argparse
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from remote_server.cli.exit_status import NoServer
from remote_server.client import ClientConfig, RemoteClient
from remote_server.errors import DeadlineExceeded, ServerUnavailable
from remote_server.protocol import PROTOCOL_VERSION, StatsReply, other_protocol
from remote_server.values import server_address


def client_of(server: str, **options: Any) -> RemoteClient:
    """A client of `server`, an address as in `--server`, with `options` of `ClientConfig`. Raises
    `ConfigError`."""
    address = server_address(server, "--server")
    return RemoteClient(ClientConfig(address.endpoint, keys=address.keys, quiet=True, **options))


@contextmanager
def connected(flags: argparse.Namespace) -> Iterator[RemoteClient]:
    """A client of the server in the flags. The block raises `NoServer` when no answer arrives in
    time."""
    client = client_of(flags.server, client_name="kvferry", transport="tcp")
    try:
        _wait_until_ready(client, server_address(flags.server).endpoint, flags.timeout_s)
        yield client
    except (ServerUnavailable, DeadlineExceeded) as error:
        if client.turned_away:
            raise NoServer(client.turned_away) from error
        what = (
            "no connection to" if client.absent else f"no answer within {flags.timeout_s:g} s from"
        )
        raise NoServer(f"{what} {flags.server}; is it running? --server names another") from error
    finally:
        client.close()


def ask_stats(client: RemoteClient, timeout_s: float, *, fingerprints: bool = False) -> StatsReply:
    """`fingerprints`: with those of namespaces. Raises `DeadlineExceeded` or `ServerUnavailable`,
    this also for a server of another protocol."""
    asked = client.stats(fingerprints=fingerprints, timeout_s=timeout_s)
    reply = asked.result(timeout_s + 1)
    if reply.protocol != PROTOCOL_VERSION:
        raise ServerUnavailable(other_protocol(reply.protocol, PROTOCOL_VERSION))
    return reply


def _wait_until_ready(client: RemoteClient, endpoint: str, timeout_s: float) -> None:
    """Requests fail until the client, which connects by itself, is ready. An attempt may fail
    because nothing listens, or because a server refuses it, whose reason comes a little later."""
    ends_by = time.monotonic() + timeout_s
    listens = False
    while not client.ready:
        if client.absent and not listens:
            listens = _listens(endpoint, timeout_s)
            ends_by = ends_by if listens else 0
        if client.turned_away or time.monotonic() > ends_by:
            raise ServerUnavailable("not connected")
        time.sleep(0.01)


def _listens(endpoint: str, timeout_s: float) -> bool:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except OSError:
        return False
    return True
