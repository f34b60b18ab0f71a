"""Admission of clients by their hello."""

import logging
from typing import NoReturn

from remote_server import protocol
from remote_server.errors import RemoteProtocolError, RequestRefused
from remote_server.plain_text import FewLines, plain
from remote_server.protocol import ErrorCode, Hello

# `doctor` compares about twenty fields; no engine needs more than this.
MAX_FINGERPRINT_FIELDS = 64


MAX_LOGGED = 256  # names of clients that are logged once


class PeerCheck:
    """Refuses clients of another protocol, and those that take this server for another one, each
    logged once by its name: it repeats its hello, and may connect again."""

    def __init__(self, lines: FewLines, name: str, most_in_flight: int) -> None:
        """`name` is the server's. `most_in_flight` bytes may be in flight for one client."""
        self._lines = lines
        self._name = name
        self._most_in_flight = most_in_flight
        self._logged: set[tuple[str, ErrorCode]] = set()

    def check(self, request: Hello) -> None:
        """Raise `RequestRefused` for such a client, and for one that cannot be served."""
        if request.protocol != protocol.PROTOCOL_VERSION:
            why = protocol.other_protocol(protocol.PROTOCOL_VERSION, request.protocol)
            self._refuse(request.client, ErrorCode.UNSUPPORTED_PROTOCOL, why)
        if request.server not in ("", self._name):
            why = protocol.wrong_server(self._name, request.server)
            self._refuse(request.client, ErrorCode.WRONG_SERVER, why)
        check_hello(request, self._most_in_flight)

    def _refuse(self, client: str, code: ErrorCode, why: str) -> NoReturn:
        if (client, code) not in self._logged:
            if len(self._logged) == MAX_LOGGED:
                self._logged.clear()
            self._logged.add((client, code))
            name = plain(client) or "a client without a name"
            self._lines.say(logging.WARNING, "refused %s: %s", name, why)
        raise RequestRefused(code, why)


def check_hello(request: Hello, most_in_flight: int) -> None:
    """Raise `RequestRefused` when such a client cannot be served. `most_in_flight` bytes may be in
    flight for it."""
    if len(request.fingerprint) > MAX_FINGERPRINT_FIELDS:
        raise RequestRefused(
            ErrorCode.BAD_REQUEST,
            f"{len(request.fingerprint)} fingerprint fields, at most {MAX_FINGERPRINT_FIELDS}",
        )
    try:
        protocol.check_names(request.namespace, request.client, request.fingerprint)
        if (report := request.report) is not None:
            protocol.check_report(report.software, report.reused)
    except RemoteProtocolError as error:
        raise RequestRefused(ErrorCode.BAD_REQUEST, str(error)) from error
    if request.block_bytes > most_in_flight:
        raise RequestRefused(
            ErrorCode.TOO_LARGE,
            f"a block of {request.block_bytes} bytes is more than --max-inflight allows one "
            f"client, {most_in_flight}",
        )
