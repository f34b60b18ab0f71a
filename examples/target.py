"""The target of `speed_test` and `stress_test`: a running server, or one started for it."""

import argparse
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from examples import tiny_model
from examples.endpoint import Endpoint, FirstToken
from examples.local_stack import LocalStack, Sizes
from examples.make_dummy_inputs import Prompt
from examples.token_sources import TokenSources, tokens_from
from remote_server.client import ClientConfig, RemoteClient
from remote_server.errors import KVFerryError
from remote_server.values import server_address

_REACH_S = 5.0


class BadFlags(ValueError):
    """Contradictory or insufficient flags. One line, with a remedy."""


@dataclass
class Target:
    """A server that answers prompts, and the known levels of their tokens.

    `stack` is set when it was started here.
    """

    endpoint: Endpoint
    model: str
    sources: TokenSources
    stack: LocalStack | None = None

    def ask(self, prompt: Prompt) -> tuple[FirstToken, dict[str, int]]:
        """The time, and the number of tokens from each level. Raises `EndpointError`."""
        before = self.sources.counts()
        answer = self.endpoint.first_token(self.model, prompt)
        return answer, tokens_from(answer, before, self.sources.counts())

    def restarted(self) -> "Target":
        """The same over the same disk, after its cache server was killed and its engine ended.
        Only for a target that was started here."""
        assert self.stack is not None
        self.stack.restart()
        return _of_stack(self.stack)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose the target."""
    parser.add_argument("--url", help="use this OpenAI-compatible server, as "
                        "http://127.0.0.1:8000")  # fmt: skip
    parser.add_argument("--start", action="store_true",
                        help="or start a small model, cache server and engine here")  # fmt: skip
    parser.add_argument("--model", metavar="NAME",
                        help="with --url: one of its several models")  # fmt: skip
    parser.add_argument("--cache-server", metavar="tcp://HOST:PORT",
                        help="with --url: kvferry's server behind it, to separate memory and "
                        "disk")  # fmt: skip
    parser.add_argument("--api-key-env", metavar="VARIABLE",
                        help="with --url: the environment variable with its key")  # fmt: skip
    parser.add_argument("--preset", choices=sorted(tiny_model.PRESETS), default="wide",
                        help="with --start: the model (default: %(default)s)")  # fmt: skip
    parser.add_argument("--models", type=Path, default=Path(".cache/models"), metavar="DIR",
                        help="with --start: folder of models (default: %(default)s)")  # fmt: skip


def check_flags(given: argparse.Namespace) -> None:
    """Raises `BadFlags`."""
    if bool(given.url) == given.start:
        raise BadFlags(
            "no target: give --url http://127.0.0.1:8000 for a running server, or --start to start "
            "one here" + ("; not both" if given.start else "")
        )
    if given.start:
        for name in ("model", "cache_server", "api_key_env"):
            if getattr(given, name):
                raise BadFlags(f"--{name.replace('_', '-')} goes with --url, not with --start")
    if given.api_key_env and given.api_key_env not in os.environ:
        raise BadFlags(f"--api-key-env {given.api_key_env}: no such environment variable")


@contextmanager
def opened(given: argparse.Namespace, sizes: Sizes) -> Iterator[Target]:
    """The target that the flags choose. Started processes end with the block. Raises
    `StartFailed`, `EndpointError`, `BadFlags`."""
    with ExitStack() as cleanup:
        if given.start:
            yield _start(given, sizes, cleanup)
            return
        headers: Mapping[str, str] = {}
        if given.api_key_env:
            headers = {"Authorization": f"Bearer {os.environ[given.api_key_env]}"}
        endpoint = Endpoint(given.url, headers=headers)
        model = given.model or endpoint.model()
        client = _client_of(given.cache_server, cleanup) if given.cache_server else None
        yield Target(endpoint, model, TokenSources(endpoint, client))


def _start(given: argparse.Namespace, sizes: Sizes, cleanup: ExitStack) -> Target:
    logs = Path(tempfile.mkdtemp(prefix="kvferry-logs-"))
    # Logs are kept after a failure and removed otherwise.
    cleanup.push(lambda kind, *_: _drop(logs) if kind in (None, KeyboardInterrupt) else None)
    stack = cleanup.enter_context(LocalStack(given.preset, sizes, given.models, logs))
    return _of_stack(stack)


def _of_stack(stack: LocalStack) -> Target:
    return Target(stack.endpoint, stack.model, TokenSources(stack.endpoint, stack.client), stack)


def _drop(logs: Path) -> None:
    shutil.rmtree(logs, ignore_errors=True)


def _client_of(address: str, cleanup: ExitStack) -> RemoteClient:
    try:
        server = server_address(address, "--cache-server")
        config = ClientConfig(server.endpoint, keys=server.keys, client_name="observer")
        client = RemoteClient(config)
    except KVFerryError as error:
        raise BadFlags(str(error)) from None
    cleanup.callback(client.close)
    if not client.wait_until_ready(_REACH_S):
        raise BadFlags(
            f"--cache-server {address}: nothing answers; it is the engine's setting 'server'. "
            "Without the flag memory and disk are one level"
        )
    return client
