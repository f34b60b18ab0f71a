"""Cases of all ways to move one model's blocks through a server, for one interleaved run.

Each case brings the server into the state it needs, so that their order is free, and verifies every
byte after the timed part: puts by reading all blocks back over tcp with checksums.
"""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks.harness.runner import Case, Skipped
from benchmarks.remote_kv_cache.baseline.peers import memcached_work, redis_work
from benchmarks.remote_kv_cache.baseline.sockets.bare_lanes import BareLanes, LaneSender
from benchmarks.remote_kv_cache.baseline.sockets.receivers import RawReceiver
from benchmarks.remote_kv_cache.baseline.sockets.sender import Sender
from benchmarks.remote_kv_cache.baseline.sockets.socket_gets import SocketGets
from benchmarks.remote_kv_cache.work import blocks
from benchmarks.remote_kv_cache.work.blocks import SharedPool, Work
from benchmarks.remote_kv_cache.work.ferry_client import (
    OVER_ZMQ,
    FerryWork,
    connect_to,
)
from benchmarks.remote_kv_cache.work.results import Variant
from benchmarks.remote_kv_cache.work.target import ELSEWHERE, Target
from remote_server.client.lanes.opening import why_slow

NAIVE = Variant("b2b naive")
TCP_WALL = Variant("raw sockets, two connections", "tcp")
LANES_PUT_WALL = Variant("lanes alone, both sides hash", "tcp", True)
LANES_GET_WALL = Variant("lanes alone, one side hashes", "tcp", True)
SHM_WALL = Variant("copy between two shared maps", "shm")
MOVER_WALL = Variant("copy and hash in one pass", "shm", True)
WALLS = {"tcp": TCP_WALL, OVER_ZMQ: TCP_WALL, "shm": SHM_WALL}

SET, SET_DEFERRED = "set deferred=False", "set deferred=True"
SET_READABLE = "set deferred=True, until readable"
GET, STREAM_GET, CONTAINS = "get", "stream_get", "contains"

REDIS_SET, REDIS_GET = "redis SET", "redis GET"
REDIS_PY_SET, REDIS_PY_GET = "redis-py MSET", "redis-py MGET"
MEMCACHED_SET, MEMCACHED_GET = "memcached set", "memcached get"


def wall_cases(
    stack: ExitStack, server: Target, source: SharedPool, target: SharedPool, work: Work
) -> list[Case]:
    """Upper bounds of any server: the copy itself, two bare connections, two lanes without a
    server, two shared maps, also with checksums."""
    if server.is_elsewhere:
        walls = (NAIVE, TCP_WALL, LANES_PUT_WALL, LANES_GET_WALL, SHM_WALL, MOVER_WALL)
        return [Case.skipped(variant, ELSEWHERE) for variant in walls]
    private = blocks.allocate(work.num_blocks, work.block_bytes)
    blocks.fill(private)
    private_target = blocks.allocate(work.num_blocks, work.block_bytes)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-")))
    there = stack.enter_context(Sender(work.num_blocks, work.block_bytes, folder, tuned=False))
    address = ("127.0.0.1", there.tcp_port)
    raw = stack.enter_context(RawReceiver(address, 2, target.pool, work))
    poison = partial(blocks.poison, target.pool)
    verify = partial(blocks.verify, source.pool, target.pool, work.everything)
    return [
        Case(
            NAIVE,
            partial(blocks.copy_naive, private, private_target, work),
            partial(blocks.poison, private_target),
            partial(blocks.verify, private, private_target, work.everything),
        ),
        Case(TCP_WALL, raw.receive, poison, verify),
        *_lanes_alone(stack, target, work, poison, verify),
        Case(
            SHM_WALL, partial(blocks.copy_naive, source.pool, target.pool, work), poison, verify
        ),
        Case(
            MOVER_WALL, partial(blocks.copy_checked, source.pool, target.pool, work), poison,
            verify,
        ),
    ]  # fmt: skip


def ferry_cases(
    stack: ExitStack, endpoint: str, namespace: str,
    source: SharedPool, target: SharedPool, work: Work, transports: Sequence[str],
) -> list[Case]:  # fmt: skip
    """kvferry over each of `transports`, with checksums and without."""
    reader = connect_to(endpoint, namespace, work.block_bytes)
    stack.callback(reader.close)
    check = FerryWork(reader, namespace, work)
    cases = []
    for transport in transports:
        for integrity in (True, False):
            try:
                client = connect_to(
                    endpoint, namespace, work.block_bytes,
                    transport=transport, integrity=integrity, rows=(source, target),
                )  # fmt: skip
            except Skipped as reason:
                cases.append(Case.skipped(Variant(STREAM_GET, transport, integrity), reason))
                continue
            stack.callback(client.close)
            ferry = FerryWork(client, namespace, work)
            cases += _one_client(ferry, check, source, target, transport, integrity, work)
            if transport == OVER_ZMQ:
                variant = Variant(GET, transport, integrity)
                try:
                    whole = SocketGets(endpoint, namespace, work, target.pool, integrity=integrity)
                except Skipped as reason:
                    cases.append(Case.skipped(variant, reason))
                    continue
                stack.callback(whole.close)
                cases.append(_get(variant, whole.get, check, source, target, work))
    return cases


def _one_client(
    ferry: FerryWork,
    check: FerryWork,
    source: SharedPool,
    target: SharedPool,
    transport: str,
    integrity: bool,
    work: Work,
) -> list[Case]:
    def named(operation: str) -> Variant:
        return Variant(operation, transport, integrity)

    kept = partial(check.verify_kept, source.pool, target.pool)
    puts: list[tuple[str, Callable[[], None]]] = [
        (SET, partial(ferry.put, source.pool, deferred=False)),
        (SET_DEFERRED, partial(ferry.put, source.pool, deferred=True)),
        (SET_READABLE, partial(ferry.put_until_readable, source.pool)),
    ]
    return [
        *(Case(named(operation), put, check.clear, kept) for operation, put in puts),
        _get(
            named(STREAM_GET), partial(ferry.get, target.pool), check, source, target, work
        ),
        Case(named(CONTAINS), ferry.contains, partial(check.make_present, source.pool)),
    ]  # fmt: skip


def _get(
    variant: Variant,
    run: Callable[[], None],
    check: FerryWork,
    source: SharedPool,
    target: SharedPool,
    work: Work,
) -> Case:
    def prepare() -> None:
        check.make_present(source.pool)
        blocks.poison(target.pool)

    verify = partial(blocks.verify, source.pool, target.pool, work.everything)
    return Case(variant, run, prepare, verify)


def _lanes_alone(
    stack: ExitStack, target: SharedPool, work: Work,
    prepare: Callable[[], None], verify: Callable[[], None],
) -> list[Case]:  # fmt: skip
    if reason := why_slow():
        return [Case.skipped(variant, reason) for variant in (LANES_PUT_WALL, LANES_GET_WALL)]
    there = stack.enter_context(LaneSender(work.num_blocks, work.block_bytes))
    lanes = stack.enter_context(BareLanes(there.port, target.pool, work))
    return [
        Case(variant, partial(lanes.receive, sender_hashes=hashes), prepare, verify)
        for variant, hashes in ((LANES_PUT_WALL, True), (LANES_GET_WALL, False))
    ]


def redis_cases(
    stack: ExitStack, beside: Target, source: SharedPool, target: SharedPool, work: Work
) -> list[Case]:
    """A real Redis on the machine of the server, or rows with the reason for its absence."""
    variants = [Variant(operation, transport) for transport in ("tcp", "unix")
                for operation in (REDIS_SET, REDIS_GET, REDIS_PY_SET, REDIS_PY_GET)]  # fmt: skip
    if beside.is_elsewhere:
        return [Case.skipped(variant, ELSEWHERE) for variant in variants]
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-")))
    try:
        server = stack.enter_context(redis_work.RedisServer(folder))
    except Skipped as reason:
        return [Case.skipped(variant, reason) for variant in variants]
    addresses: dict[str, tuple[str, int] | str] = {
        "tcp": ("127.0.0.1", server.port), "unix": server.unix
    }  # fmt: skip
    cases: list[Case] = []
    for transport, address in addresses.items():
        plain = redis_work.PlainRedis(address)
        stack.callback(plain.close)
        clear = partial(plain.ask, b"FLUSHALL")
        kept = partial(redis_work.verify_kept, plain, source.pool, target.pool, work)
        came = partial(blocks.verify, source.pool, target.pool, work.everything)

        def prepare(plain: redis_work.PlainRedis = plain) -> None:
            if int(plain.ask(b"DBSIZE")[1:]) < work.num_blocks:
                plain.set_all(source.pool, work)
            blocks.poison(target.pool)

        put, get = Variant(REDIS_SET, transport), Variant(REDIS_GET, transport)
        cases += [
            Case(put, partial(plain.set_all, source.pool, work), clear, kept),
            Case(get, partial(plain.get_all, target.pool, work), prepare, came),
        ]
        put, get = Variant(REDIS_PY_SET, transport), Variant(REDIS_PY_GET, transport)
        try:
            redis = redis_work.redis_py()
        except Skipped as reason:
            cases += [Case.skipped(put, reason), Case.skipped(get, reason)]
            continue
        client = (
            redis.Redis(unix_socket_path=address)
            if isinstance(address, str)
            else redis.Redis(*address)
        )
        stack.callback(client.close)
        set_all = partial(redis_work.set_with_redis_py, client, source.pool, work)
        get_all = partial(redis_work.get_with_redis_py, client, target.pool, work)
        cases += [Case(put, set_all, clear, kept), Case(get, get_all, prepare, came)]
    return cases


def memcached_cases(
    stack: ExitStack, beside: Target, source: SharedPool, target: SharedPool, work: Work
) -> list[Case]:
    """A real memcached on the machine of the server, or rows with the reason for its absence."""
    put, get = Variant(MEMCACHED_SET, "tcp"), Variant(MEMCACHED_GET, "tcp")
    if beside.is_elsewhere:
        return [Case.skipped(variant, ELSEWHERE) for variant in (put, get)]
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-")))
    try:
        server = stack.enter_context(
            memcached_work.MemcachedServer(work.num_bytes, work.block_bytes, folder, "tcp")
        )
    except Skipped as reason:
        return [Case.skipped(variant, reason) for variant in (put, get)]
    client = memcached_work.ZeroCopyMemcached(server.address, work)
    stack.callback(client.close)

    def prepare() -> None:
        if not client.holds_all:
            client.set_all(source.pool)
        blocks.poison(target.pool)

    kept = partial(client.verify_kept, source.pool, target.pool)
    came = partial(blocks.verify, source.pool, target.pool, work.everything)
    return [
        Case(put, partial(client.set_all, source.pool), client.clear, kept),
        Case(get, partial(client.get_all, target.pool), prepare, came),
    ]
