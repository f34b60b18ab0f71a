"""`kvferry drain`: end a server in order, through its admin HTTP; before that its packs can be
written to the bucket, where other servers find them."""

import argparse
import json
import os
import time
from http.client import HTTPException, HTTPResponse
from typing import Any

from remote_server.cli.exit_status import NoServer
from remote_server.cli.flags import add_json, seconds
from remote_server.cli.output import print_error, print_lines
from remote_server.cli.parser import Command, Parser
from remote_server.cli.progress import Progress
from remote_server.errors import ConfigError, KVFerryError
from remote_server.keys import one_word, read_small
from remote_server.protocol.codec import ascii_json
from remote_server.values import ADMIN_DEFAULT, admin_address, format_bytes

POLL_S = 0.5

# A server that does not answer for so long is gone, and its drain with it.
PATIENCE_S = 10.0


def add_flags(parser: Parser) -> None:
    parser.add_argument("admin", nargs="?", metavar="ADMIN",
                        default=os.environ.get("KVFERRY_ADMIN", ADMIN_DEFAULT),
                        help="of the server (KVFERRY_ADMIN; default: %(default)s)")  # fmt: skip
    parser.add_argument("--admin-token-file", metavar="FILE",
                        default=os.environ.get("KVFERRY_ADMIN_TOKEN_FILE", ""),
                        help="the server's token (KVFERRY_ADMIN_TOKEN_FILE)")  # fmt: skip
    parser.add_argument("--to-bucket", action="store_true", help="write all packs, and stay")
    parser.add_argument("--timeout-s", type=seconds, default=5.0, metavar="SECONDS",
                        help="how long to wait for an answer (default: %(default)s)")  # fmt: skip
    add_json(parser)


def run(flags: argparse.Namespace) -> int:
    address = admin_address(flags.admin)
    if address is None:
        raise ConfigError("admin: off: name the admin HTTP of a server")
    admin = Admin(address.url, _token_of(flags.admin_token_file), flags.timeout_s)
    if flags.to_bucket:
        return _to_bucket(admin, flags)
    answer = admin.ask("POST", "/drain")
    if flags.json:
        print_lines(ascii_json(answer))
    else:
        print_lines(f"{admin.url} drains, and ends within {answer['ends_within_s']:g} s")
    return 0


def _token_of(file: str) -> str:
    """The word in `file`, empty without one. Raises `ConfigError`."""
    if not file:
        return ""
    data = read_small(file, "admin_token_file").data
    return one_word(data, file, "admin_token_file").decode()


def _to_bucket(admin: "Admin", flags: argparse.Namespace) -> int:
    done = admin.ask("POST", "/drain", {"to_bucket": True})
    began = time.monotonic()
    try:
        with Progress(quiet=flags.json) as progress:
            while not done["is_over"]:
                progress.show(
                    f"{done['written']:,} packs written, {_size(done)}; {done['left']:,} left; "
                    f"{done['looked_at']:,} rows seen"
                )
                time.sleep(POLL_S)
                done = _so_far(admin)
    except KeyboardInterrupt:
        print_error("the server goes on draining; run it again to see how far it is")
        raise
    if flags.json:
        print_lines(ascii_json(done))
    else:
        took_s = time.monotonic() - began
        print_lines(f"{done['written']:,} packs written, {_size(done)}, in {took_s:.1f} s")
        if done["incomplete"]:
            print_lines(f"{done['incomplete']:,} packs are incomplete, and stay where they are")
    if done["left"]:
        print_error(f"{done['left']:,} packs are left: {done['reason']}; "
                    "`kvferry doctor` names the cause; then run it again")  # fmt: skip
        return 1
    if not flags.json:
        print_lines("the server takes no puts and serves reads: take it off the list of servers, "
                    "then stop it")  # fmt: skip
    return 0


def _so_far(admin: "Admin") -> dict[str, Any]:
    """The state of the drain. A busy server may answer late."""
    ends_by = time.monotonic() + PATIENCE_S
    while True:
        try:
            return admin.ask("GET", "/drain")
        except NoServer:
            if time.monotonic() > ends_by:
                raise
            time.sleep(POLL_S)


def _size(done: dict[str, Any]) -> str:
    return format_bytes(done["written_bytes"])


class Admin:
    """The admin HTTP of one server."""

    def __init__(self, url: str, token: str, timeout_s: float) -> None:
        self.url = url
        self._token = token
        self._timeout_s = timeout_s

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The JSON of the answer. Raises `KVFerryError` with the words of a refusal, or
        `NoServer`."""
        from urllib.error import HTTPError
        from urllib.request import ProxyHandler, Request, build_opener

        data = json.dumps(body or {}).encode() if method == "POST" else None
        request = Request(self.url + path, data, method=method)
        if self._token:
            request.add_header("Authorization", f"Bearer {self._token}")
        try:
            reply: HTTPResponse
            with build_opener(ProxyHandler({})).open(request, timeout=self._timeout_s) as reply:
                answer: dict[str, Any] = json.load(reply)
                return answer
        except HTTPError as error:
            words = error.read(500).decode("utf-8", "replace").strip()
            if error.code == 503:
                raise NoServer(f"{self.url}: {words}") from error
            raise KVFerryError(
                f"{self.url} refuses: {words}"
                if error.code in (401, 403)
                else f"{self.url}: {words}"
            ) from error
        except (OSError, HTTPException, ValueError) as error:
            raise NoServer(f"no answer from the admin HTTP at {self.url}: {error}") from error


COMMAND = Command(
    add_flags,
    run,
    description="The server takes no more puts, finishes what is under way and ends. With "
    "--to-bucket it writes every complete pack of memory and disk that the bucket lacks, and "
    "serves reads until you stop it. Exit status 1 when packs are left.",
    examples="""\
kvferry drain --admin-token-file /etc/kvferry/admin.token
kvferry drain 10.0.0.7:5758 --to-bucket --admin-token-file admin.token
""",
)
