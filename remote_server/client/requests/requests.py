"""Small requests, the messages of each and its result."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

import msgspec

from remote_server import protocol
from remote_server.client.cache_requests import LookupRequest
from remote_server.client.config import ClientConfig
from remote_server.client.connection.channel import check_keys, check_namespace
from remote_server.client.connection.limits import Limits
from remote_server.client.connection.session import Declaration
from remote_server.client.results import Counters, Op, fail, resolve
from remote_server.errors import ConfigError, KVFerryError, RemoteProtocolError

_STATES = bytes(protocol.KeyState)

Build = Callable[..., protocol.Request]
"""Makes the message of one part of a request once its `request_id` is known."""


@dataclass(slots=True, eq=False)
class Ask:
    """A request with one small reply per message. `end` is called exactly once."""

    op: Op
    split: Callable[[Limits], list[Build]]
    """The messages to send, each within these limits."""

    fits: Callable[[protocol.Reply, Build], bool]
    """Whether a reply is a possible one to that message; any other is ignored."""

    end: Callable[[list[Any] | KVFerryError], None]
    """Receives the replies in the order of the messages, or the error."""

    end_late: Callable[[list[Any]], None] | None = field(default=None, kw_only=True)
    """Receives the replies that were complete only after the deadline, at most once."""

    timeout_s: float
    """Counts from when the I/O thread takes the request over."""

    namespace: str | None = None
    always: bool = False
    """Sent even when the session is not ready: hellos make it ready."""

    parts: list[Build] = field(default_factory=list)
    replies: list[protocol.Reply | None] = field(default_factory=list)
    num_sent: int = 0
    num_replies: int = 0
    ended: bool = False
    deadline: float = inf

    def turn_away(self, error: KVFerryError) -> None:
        if not self.ended:
            self.ended = True
            self.end(error)


def hello(
    declaration: Declaration,
    config: ClientConfig,
    end: Callable[[list[protocol.Welcome] | KVFerryError], None],
    report: protocol.EngineReport | None = None,
) -> Ask:
    """Declare a namespace; `end` receives the welcome."""
    build = _hello(declaration, config, report)
    fits = _is(protocol.Welcome)
    return Ask(Op.HELLO, lambda _: [build], fits, end, config.hello_timeout_s, always=True)


def check_hello(declaration: Declaration, config: ClientConfig) -> None:
    """Raise `ConfigError` when its hello cannot be sent: it would fail for ever."""
    try:
        protocol.encode(_hello(declaration, config)(request_id=1))
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"namespace {declaration.namespace!r:.80}: {error}") from error
    try:
        protocol.check_names(declaration.namespace, config.client_name, declaration.fingerprint)
    except (RemoteProtocolError, AttributeError, TypeError) as error:  # the two: not text
        raise ConfigError(str(error)) from error


def _hello(
    declaration: Declaration, config: ClientConfig, report: protocol.EngineReport | None = None
) -> Build:
    return partial(
        protocol.Hello,
        protocol=protocol.PROTOCOL_VERSION,
        namespace=declaration.namespace,
        block_bytes=declaration.block_bytes,
        client=config.client_name,
        fingerprint=dict(declaration.fingerprint),
        server=config.server_name,
        fleet=config.fleet_digest,
        report=report,
    )


def lookup(future: "Future[protocol.Found]", asked: LookupRequest, *, fleet: bool = False) -> Ask:
    """`future` receives one `Found` for all keys, from any number of messages. After its deadline
    `on_late` receives it instead. With `explain` the namespace need not be declared here. With
    `fleet` the replies have the load."""

    def fits(reply: protocol.Reply, part: Build) -> bool:
        return (
            isinstance(reply, protocol.Found)
            and len(reply.states) == len(_keys_of(part))
            and not reply.states.translate(None, _STATES)  # no other byte
        )

    def merge(replies: list[protocol.Found]) -> protocol.Found:
        states = b"".join(reply.states for reply in replies)
        # Computed here, not taken from the replies: a prefix must not exceed its states.
        prefix = len(states) - len(states.lstrip(bytes([protocol.KeyState.READABLE])))
        last = replies[-1] if replies else protocol.Found(
            request_id=0, epoch="", prefix=0, states=b""
        )  # fmt: skip
        return protocol.Found(
            request_id=last.request_id, epoch=last.epoch, prefix=prefix, states=states,
            chain=[stretch for reply in replies for stretch in reply.chain],
            remote=_joined_runs(replies),
            copies=[copies for reply in replies for copies in reply.copies],
            load=last.load,
        )  # fmt: skip

    on_late = asked.on_late
    end_late = None if on_late is None else lambda replies: on_late(merge(replies))
    kind = partial(protocol.Lookup, explain=asked.explain, fleet=fleet, hint=asked.hint)
    return Ask(
        Op.LOOKUP, _by_keys(kind, asked.namespace, asked.keys, asked.chain), fits,
        _resolve(future, merge), asked.timeout_s, None if asked.explain else asked.namespace,
        end_late=end_late,
    )  # fmt: skip


def locate(
    future: "Future[protocol.Located]",
    namespace: str | None,
    keys: Sequence[bytes],
    timeout_s: float,
) -> Ask:
    """`future` receives one `Located` for all of `keys`, from any number of messages. Any
    namespace, declared here or not; None for all."""
    sizes: list[int] = []

    def split(limits: Limits) -> list[Build]:
        builds = _by_keys(protocol.Locate, namespace, keys)(limits)
        sizes[:] = [len(_keys_of(part)) for part in builds]
        return builds

    def fits(reply: protocol.Reply, part: Build) -> bool:
        return isinstance(reply, protocol.Located) and all(
            len(places) == len(_keys_of(part)) and max(places, default=0) <= len(reply.tiers)
            for places in reply.namespaces.values()
        )

    def merge(replies: list[protocol.Located]) -> protocol.Located:
        names = dict.fromkeys(name for reply in replies for name in reply.namespaces)
        places = {
            name: b"".join(
                reply.namespaces.get(name, bytes(size))
                for reply, size in zip(replies, sizes, strict=True)
            )
            for name in names
        }
        if not replies:
            return protocol.Located(request_id=0, epoch="", tiers=[], namespaces={})
        return msgspec.structs.replace(replies[-1], namespaces=places)

    return Ask(Op.LOCATE, split, fits, _resolve(future, merge), timeout_s)


def _joined_runs(replies: list[protocol.Found]) -> list[int]:
    """The runs of remote keys of `replies`, which answer one lookup in parts."""
    runs: list[int] = []
    begin = 0
    for reply in replies:
        for first, number in zip(reply.remote[::2], reply.remote[1::2], strict=False):
            runs += (begin + first, number)
        begin += len(reply.states)
    return runs


def touch(future: "Future[int]", namespace: str, keys: Sequence[bytes], timeout_s: float) -> Ask:
    """`future` receives the number of blocks that were there."""

    def merge(replies: list[protocol.Touched]) -> int:
        return sum(reply.touched for reply in replies)

    split = _by_keys(protocol.Touch, namespace, keys)
    return Ask(
        Op.TOUCH, split, _is(protocol.Touched), _resolve(future, merge), timeout_s, namespace
    )


def stats(future: "Future[protocol.StatsReply]", timeout_s: float, *, fingerprints: bool) -> Ask:
    """`future` receives the server's stats."""

    fits = _is(protocol.StatsReply)
    build = partial(protocol.Stats, fingerprints=fingerprints)
    return Ask(Op.STATS, lambda _: [build], fits, _resolve(future, _first), timeout_s)


def record(future: "Future[protocol.Recorded]", after: int | None, timeout_s: float) -> Ask:
    """`future` receives the requests behind number `after`."""
    build = partial(protocol.Record, after=after)
    fits = _is(protocol.Recorded)
    return Ask(Op.RECORD, lambda _: [build], fits, _resolve(future, _first), timeout_s)


def clear(
    future: "Future[protocol.Cleared]",
    namespace: str | None,
    timeout_s: float,
    *,
    forget: bool = False,
) -> Ask:
    """`future` receives the numbers of removed blocks. Any namespace, declared here or not."""

    def split(_: Limits) -> list[Build]:
        if namespace is not None:
            check_namespace(namespace)
        return [partial(protocol.Clear, namespace=namespace, forget=forget)]

    return Ask(Op.CLEAR, split, _is(protocol.Cleared), _resolve(future, _first), timeout_s)


def keep(
    future: "Future[protocol.Kept]",
    namespace: str,
    keys: Sequence[bytes] | None,
    timeout_s: float,
    *,
    keep: bool,
) -> Ask:
    """`future` receives the sum of the replies. Any namespace, declared here or not."""

    def merge(replies: list[protocol.Kept]) -> protocol.Kept:
        return protocol.Kept(
            request_id=replies[-1].request_id if replies else 0,
            epoch=replies[-1].epoch if replies else "",
            kept=sum(reply.kept for reply in replies),
            bytes=sum(reply.bytes for reply in replies),
            declined=sum(reply.declined for reply in replies),
        )

    kind = partial(protocol.Keep, keep=keep)

    def split(limits: Limits) -> list[Build]:
        check_namespace(namespace)
        if keys is None:
            return [partial(kind, namespace=namespace)]
        return _by_keys(kind, namespace, keys)(limits)

    return Ask(Op.KEEP, split, _is(protocol.Kept), _resolve(future, merge), timeout_s)


def verify(namespace: str, keys: Sequence[bytes], timeout_s: float, counters: Counters) -> Ask:
    """Report to the server that its copies of `keys` came out wrong here. No caller waits."""

    def end(result: list[Any] | KVFerryError) -> None:
        for reply in result if isinstance(result, list) else ():
            counters["verify_removed"] += reply.removed
            counters["verify_intact"] += reply.intact

    split = _by_keys(protocol.Verify, namespace, keys)
    return Ask(Op.VERIFY, split, _is(protocol.Verified), end, timeout_s, namespace)


def _by_keys(
    kind: Build,
    namespace: str | None,
    keys: Sequence[bytes],
    chain: Sequence[protocol.Stretch] = (),
) -> Callable[[Limits], list[Build]]:
    def split(limits: Limits) -> list[Build]:
        one_length = check_keys(keys)
        key_bytes = one_length if limits.packed_keys else 0
        builds: list[Build] = []
        for first in range(0, len(keys), limits.max_keys):
            part = list(keys[first : first + limits.max_keys])
            builds.append(partial(kind, namespace=namespace, keys=part, key_bytes=key_bytes))
            if chain:
                of_part = protocol.select(chain, range(first, first + len(part)))
                builds[-1] = partial(builds[-1], chain=of_part)
        return builds

    return split


def _keys_of(part: Build) -> list[bytes]:
    assert isinstance(part, partial)
    return part.keywords["keys"]  # type: ignore[no-any-return]


def _is(kind: type) -> Callable[[protocol.Reply, Build], bool]:
    return lambda reply, _: isinstance(reply, kind)


def _first(replies: list[Any]) -> Any:
    return replies[0]


def _resolve(
    future: "Future[Any]", merge: Callable[[list[Any]], Any]
) -> Callable[[list[Any] | KVFerryError], None]:
    def end(result: list[Any] | KVFerryError) -> None:
        if isinstance(result, KVFerryError):
            fail(future, result)
        else:
            resolve(future, merge(result))

    return end
