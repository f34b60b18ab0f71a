"""Puts and gets that are cut off in each of their states: nothing stays behind, all is counted."""

import logging
from collections.abc import Iterator

import pytest
from dict_tier import DictTier
from gates import once
from handler_bench import REGION_BYTES, HandlerBench
from shared_messages import shared_get, shared_put
from wire_peer import block, key

from remote_server import protocol, turns
from remote_server.protocol import Blocks, Get, Got, Hello, Put, Release
from remote_server.server.sending import outgoing
from remote_server.server.sending.bounds import Allowance
from remote_server.server.shm import put as shm_put
from remote_server.server.shm.put import Rows
from remote_server.server.transfer import copier, put, streamed_get
from remote_server.server.zmq import get as zmq_get
from remote_server.server.zmq import put as zmq_put
from remote_server.server.zmq.put import Frames
from remote_server.store import gets
from remote_server.store.stack.admission import Admission
from remote_server.store.stack.write_behind import BlocksBelow
from remote_server.turns import Steps, to_end

pytestmark = pytest.mark.real_time

CLIENT = b"client"
LENGTH = 4096
TOKEN = 7
TICKET = 3
ALL = range(6)  # three parts of two keys


class Bench(HandlerBench):
    """Handlers above a tier that reads a block when the test lets it. `later` has the steps of
    requests whose blocks were read."""

    def __init__(self) -> None:
        super().__init__([BlocksBelow(DictTier(1000), Admission())])
        self.later: list[Steps[None]] = []
        self.replies._later = lambda client, steps: self.later.append(steps)
        self.asked = 0
        self.begin(Hello(request_id=1, protocol=2, namespace="ns", block_bytes=LENGTH))

    def begin(self, request: protocol.Request, *payload: bytes) -> Steps[None] | None:
        """The steps that are left after the first."""
        self.asked += not isinstance(request, Release)
        frames = [*protocol.encode(request), *payload]
        return self.handlers.handle(CLIENT, [memoryview(frame) for frame in frames])

    def run(self, request: protocol.Request, *payload: bytes) -> None:
        """All steps, and the turn behind them."""
        steps = self.begin(request, *payload)
        if steps is not None:
            to_end(steps)
        self.turn()

    def read_below(self) -> None:
        """The tier below finishes its reads and writes."""
        self.store.tier_stack.finish_jobs()

    def only_below(self) -> None:
        """All six blocks are in the tier below memory, and nowhere else."""
        self.run(put_of("tcp"), *payload_of("tcp"))
        self.read_below()
        self.tier.clear(None)
        self.asked -= 1
        self.send_queues.replies.pop()

    def last_reply(self) -> protocol.Reply:
        return self.send_queues.replies[-1][1]

    def finish(self) -> None:
        """Every step of every request, every read and every message."""
        for _ in range(2):
            self.read_below()
            while self.later:
                to_end(self.later.pop(0))
            self.settle()

    def nothing_is_left(self) -> bool:
        """Nothing is pinned, pending, leased, waiting or in a state; the counts of puts add up."""
        self.finish()
        stats, counts = self.tier.stats(), self.store.all_counters()
        under_way = [*self.puts.in_state.values(), *self.gets.in_state.values()]
        held = (stats.pinned, stats.pending, len(self.leases), self.transports.zmq.uncopied.total)
        jobs = (
            self.fills.num_waiting,
            self.copier.turns.num_waiting,
            self.transports.shm.puts.num_blocks,
        )
        ends = sum(
            counts[f"put_{end}"] for end in ("created", "existed", "forced", "duplicate")
        ) + sum(count for name, count in counts.items() if name.startswith("put_declined"))
        self.store.tier_stack.check()
        assert (held, jobs) == ((0, 0, 0, 0), (0, 0, 0))
        assert under_way == [0] * 6
        assert counts["put_total"] == ends
        assert counts["get_total"] == counts["get_hit"] + counts["get_miss"]
        return True

    def answers(self) -> int:
        """How many requests were answered; blocks of streams are no answers."""
        return len(self.send_queues.replies)


def put_of(transport: str, **fields: object) -> Put:
    common = {
        "request_id": 2, "namespace": "ns", "keys": [key(n) for n in ALL],
        "lengths": [LENGTH] * len(ALL),
        "checksums": [protocol.checksum("ns", key(n), block(n, LENGTH)) for n in ALL],
    }  # fmt: skip
    if transport == "tcp":
        return Put(**{**common, "deferred": False, **fields})
    offsets = [n * LENGTH for n in ALL]
    shared = {"region": TOKEN, "offsets": offsets, "ticket": TICKET, "ticket_value": 1}
    return shared_put(**{**common, **shared, **fields})


def payload_of(transport: str) -> list[bytes]:
    return [block(n, LENGTH) for n in ALL] if transport == "tcp" else []


def get_of(kind: str) -> Get:
    keys = [key(n) for n in ALL]
    if kind == "lease":
        return shared_get(request_id=9, namespace="ns", keys=keys, region=TOKEN)
    return Get(request_id=9, namespace="ns", keys=keys, stream=kind == "stream")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A step is two keys, and a turn is a block."""
    for module in (turns, gets, copier, put, streamed_get, zmq_get):
        monkeypatch.setattr(module, "KEYS_PER_STEP", 2)
    for source in (Frames, Rows):
        monkeypatch.setattr(source, "turn_bytes", LENGTH)
    bench = Bench()
    bench.attach(TOKEN)
    assert len(ALL) * LENGTH <= REGION_BYTES
    for n in ALL:
        bench.write_row(n * LENGTH, block(n, LENGTH))
    bench.set_ticket(TICKET, 1)
    yield bench
    bench.close()


def in_state(counts: dict[str, int]) -> list[str]:
    return [state for state, count in counts.items() if count]


# ── puts ─────────────────────────────────────────────────────────────────────────────────────

TRANSPORTS = pytest.mark.parametrize("transport", ["tcp", "shm", "threads"])
"""`threads`: rows that other threads copy, however few bytes they are."""


def begun(bench: Bench, transport: str, **fields: object) -> Steps[None]:
    """The steps of a put whose first part is reserved."""
    steps = bench.begin(put_of(transport, **fields), *payload_of(transport))
    assert steps is not None
    assert in_state(bench.puts.in_state) == ["reserving"]
    assert bench.tier.stats().pending == 2
    return steps


def queued(bench: Bench, transport: str, turns_taken: int = 0, **fields: object) -> None:
    """A put that is filled, so many turns long."""
    if transport == "threads":
        bench.copy_on_threads()
    to_end(begun(bench, transport, **fields))
    assert in_state(bench.puts.in_state) == ["filling"]
    for _ in range(turns_taken):
        take_turn(bench, transport)


def take_turn(bench: Bench, transport: str) -> bool:
    """Of the copies of `transport`. True when there is more to do at once."""
    if transport == "tcp":
        return bench.copier.copy_some()
    more = bench.fills.fill_some()
    if transport == "threads":
        bench.moves.finish()  # some, or none, have completed: the put must not depend on it
        return bench.fills.busy
    return more


@TRANSPORTS
def test_a_put_passes_its_states_and_is_answered_at_the_end(bench, transport):
    queued(bench, transport)
    seen = []
    while take_turn(bench, transport):
        seen += in_state(bench.puts.in_state)
    assert [*dict.fromkeys(seen)] == (
        ["filling"] if transport == "tcp" else ["filling", "publishing"]
    )
    assert bench.last_reply().created == len(ALL)
    assert bench.nothing_is_left()
    assert bench.answers() == bench.asked


@TRANSPORTS
def test_a_put_whose_client_leaves_while_slots_are_reserved_leaves_none(bench, transport, caplog):
    caplog.set_level(logging.DEBUG, "remote_server.turns")
    begun(bench, transport).close()
    assert bench.nothing_is_left()
    assert bench.answers() == bench.asked - 1, "there is no client to answer"
    assert bench.store.counters["put_declined_withdrawn"] == 2
    assert "Put 2 of connection 636c69656e74: dropped, was reserving" in caplog.text


@TRANSPORTS
@pytest.mark.parametrize("code", ["unknown_namespace", "internal"])
def test_a_put_that_fails_in_a_later_step_of_its_reservation_is_answered_so(
    bench, transport, code, monkeypatch
):
    """Blocks of a namespace that was forgotten, and declared with another size, would be written
    into slots of that size."""
    steps = begun(bench, transport)
    if code == "internal":
        once(monkeypatch, bench.store.puts, "begin")
    else:
        bench.store.clear("ns", forget=True)
        bench.run(Hello(request_id=3, protocol=2, namespace="ns", block_bytes=LENGTH // 2))
    to_end(steps)
    assert bench.last_reply().code == code
    assert bench.nothing_is_left()
    assert bench.answers() == bench.asked


def leave(bench: Bench) -> None:
    bench.router.gone.add(CLIENT)
    bench.detach()


def clear(bench: Bench) -> None:
    assert bench.store.clear(None)


def drain(bench: Bench) -> None:
    bench.handlers.draining = True


def stop(bench: Bench) -> None:
    bench.copier.stop()
    bench.detach()


CUTS = pytest.mark.parametrize("cut", [leave, clear, drain, stop])
TURNS = pytest.mark.parametrize("turns_taken", [0, 1, 5, 6, 8])
"""The first blocks, the last one, its publication, the end."""
DEFERRED = pytest.mark.parametrize(
    ("turns_taken", "deferred"),
    [(0, False), (0, True), (1, False), (5, False), (6, True), (8, False)],
)


@TRANSPORTS
@CUTS
@TURNS
def test_a_put_that_is_cut_off_at_any_turn_ends_once(bench, transport, cut, turns_taken):
    queued(bench, transport, turns_taken)
    cut(bench)
    assert bench.nothing_is_left()
    assert bench.answers() == bench.asked


@TRANSPORTS
@DEFERRED
def test_a_put_whose_filling_raises_is_answered_once(
    bench, transport, turns_taken, monkeypatch, deferred
):
    queued(bench, transport, turns_taken, deferred=deferred)
    once(monkeypatch, *((zmq_put, "copy_in") if transport == "tcp" else (shm_put, "copy_shared")))
    assert bench.nothing_is_left()
    assert turns_taken or bench.store.counters["put_declined_checksum"] > 0
    assert bench.answers() == bench.asked


@TRANSPORTS
@DEFERRED
def test_a_put_whose_publication_raises_is_answered_once_and_its_other_parts_end(
    bench, transport, turns_taken, monkeypatch, deferred
):
    queued(bench, transport, turns_taken, deferred=deferred)
    once(monkeypatch, bench.store.puts, "end")
    bench.finish()
    assert bench.answers() == bench.asked
    assert in_state(bench.puts.in_state) == []
    assert bench.tier.stats().pending in (0, 2), "those of the part that raised"
    assert bench.transports.zmq.uncopied.total == bench.transports.shm.puts.num_blocks == 0


@TRANSPORTS
def test_a_put_with_a_wrong_checksum_keeps_its_other_blocks(bench, transport):
    put = put_of(transport)
    put.checksums[3] ^= 1
    bench.run(put, *payload_of(transport))
    assert (bench.last_reply().created, bench.last_reply().declined) == (5, {"checksum": 1})
    assert bench.nothing_is_left()


@pytest.mark.parametrize("limit", ["of one", "of all"])
def test_a_put_beyond_what_may_wait_to_be_copied_is_refused(bench, limit, monkeypatch):
    enough = copier.waiting_bytes(len(ALL), len(ALL) * LENGTH)
    if limit == "of one":
        monkeypatch.setattr(copier, "MAX_UNCOPIED_BYTES", enough)
    else:
        monkeypatch.setattr(bench.transports.zmq.uncopied, "_most", enough)
    queued(bench, "tcp")
    another = put_of("tcp", request_id=3, keys=[b"other %d" % n for n in ALL], checksums=[])
    bench.handle(b"another", [*protocol.encode(another), *payload_of("tcp")])
    assert bench.answers() == (1 if limit == "of one" else 2), "of another client"
    bench.handle(CLIENT, [*protocol.encode(another), *payload_of("tcp")])
    assert bench.last_reply().code == "too_much_in_flight"
    assert bench.tier.stats().pending == len(ALL) * (2 if limit == "of one" else 1)
    assert bench.nothing_is_left()
    bench.run(another, *payload_of("tcp"))
    assert bench.last_reply().total == len(ALL)


@TURNS
@pytest.mark.parametrize("withdraw", [lambda bench: bench.set_ticket(TICKET, 2), Bench.detach])
def test_a_put_whose_ticket_or_region_is_taken_away_keeps_all_of_its_blocks_or_none(
    bench, turns_taken, withdraw
):
    queued(bench, "shm", turns_taken)
    withdraw(bench)
    bench.finish()
    if turns_taken < len(ALL):
        assert bench.last_reply().declined == {"withdrawn": len(ALL)}
    else:
        assert bench.last_reply().created == len(ALL)
    assert bench.nothing_is_left()


# ── gets ─────────────────────────────────────────────────────────────────────────────────────

KINDS = pytest.mark.parametrize("kind", ["whole", "stream", "lease"])


def found(bench: Bench, kind: str) -> Steps[None]:
    """The steps of a get that has found its first blocks."""
    bench.run(put_of("tcp"), *payload_of("tcp"))
    bench.read_below()  # blocks are pinned while the tier below writes them
    steps = bench.begin(get_of(kind))
    assert steps is not None
    assert in_state(bench.gets.in_state) == ["finding"]
    return steps


def reading(bench: Bench, kind: str) -> None:
    """A get that waits for the tier below memory."""
    bench.only_below()
    bench.run(get_of(kind))
    assert in_state(bench.gets.in_state) == ["reading"]


def sending(bench: Bench, kind: str) -> None:
    """A get whose client does not read, or holds a lease."""
    bench.router.full.add(CLIENT)
    to_end(found(bench, kind))
    bench.send_queues.send_some()
    assert in_state(bench.gets.in_state) == ["sending"]
    assert bench.tier.stats().pinned == len(ALL)


@KINDS
@pytest.mark.parametrize("where", ["memory", "below"])
def test_a_get_whose_client_leaves_while_blocks_are_found_pins_none(bench, kind, where, caplog):
    caplog.set_level(logging.DEBUG, "remote_server.turns")
    if where == "memory":
        steps = found(bench, kind)
        assert bench.tier.stats().pinned == 2
    else:
        bench.only_below()
        steps = bench.begin(get_of(kind))
    steps.close()
    assert bench.nothing_is_left()
    assert bench.answers() == bench.asked - 1
    assert "Get 9 of connection 636c69656e74: dropped, was finding" in caplog.text


def test_a_fault_at_the_end_of_a_request_whose_client_left_ends_no_other(bench):
    """The loop drops all requests of the client, one after the other."""

    def steps():
        try:
            yield
        finally:
            raise ZeroDivisionError("a bug")

    requests = [bench.replies.rest_of(CLIENT, number, steps()) for number in range(2)]
    for request in requests:
        next(request)
    for request in requests:
        request.close()
    assert [reply.request_id for _, reply in bench.send_queues.replies[-2:]] == [0, 1]
    assert bench.store.counters["refused_internal"] == 2


@pytest.mark.parametrize("kind", ["whole", "stream"])
def test_blocks_that_leave_between_two_steps_of_a_get_are_misses_and_pinned_ones_stay(bench, kind):
    """Pinned from the last key to the first."""
    steps = found(bench, kind)
    bench.router.sent.clear()
    bench.store.clear("ns")
    to_end(steps)
    bench.finish()
    assert received(bench) == [(n, block(n, LENGTH)) for n in ALL[-2:]]
    counts = bench.store.all_counters()
    assert (counts["get_hit"], counts["get_miss"]) == (2, len(ALL) - 2)
    assert bench.nothing_is_left()


@pytest.mark.parametrize(("kind", "least"), [("whole", 1), ("stream", 2), ("lease", 3)])
def test_a_get_of_many_keys_has_a_step_for_each_part_that_it_pins_and_looks_at(bench, kind, least):
    """One step has been taken. A whole get looks at its blocks as it makes its message."""
    assert sum(1 for _ in found(bench, kind)) >= least
    bench.finish()
    assert bench.last_reply().hit == len(ALL)


@KINDS
@pytest.mark.parametrize(
    ("code", "message"),
    [("too_much_in_flight", "at most 12.0 KiB"), ("internal", "MemoryError: no room")],
)
def test_a_get_that_fails_in_a_later_step_of_its_search_pins_none(
    bench, kind, code, message, monkeypatch
):
    steps = found(bench, kind)
    if code == "internal":
        once(monkeypatch, bench.tier, "pin_all")
    else:
        monkeypatch.setattr(bench.gets.in_flight, "per_client", 3 * LENGTH)
    to_end(steps)
    bench.finish()
    assert bench.last_reply().code == code and message in bench.last_reply().message
    assert bench.store.counters[f"refused_{code}"] == 1
    assert bench.nothing_is_left()
    assert bench.answers() == bench.asked


def received(bench: Bench) -> list[tuple[int, bytes]]:
    """The blocks that were sent, each with its place among the keys."""
    arrived: list[tuple[int, bytes]] = []
    for _, (_, header, *frames) in bench.router.sent:
        reply = protocol.decode_reply(header)
        if isinstance(reply, Got | Blocks) and reply.lengths:
            views = protocol.split_frames([*map(memoryview, frames)], reply.lengths,
                                          reply.blocks_per_frame)  # fmt: skip
            indices = reply.indices if isinstance(reply, Blocks) else reply.found
            arrived += zip(indices, map(bytes, views), strict=True)
    return arrived


@pytest.mark.parametrize("kind", ["whole", "stream"])
def test_a_get_in_steps_finds_what_memory_and_the_tier_below_have_in_order(bench, kind):
    """The search begins with the last blocks, which are in memory; those before show that it must
    read."""
    bench.only_below()
    bench.run(put_of("tcp", force=True, **last_of(2)), *payload_of("tcp")[-2:])
    assert bench.tier.stats().blocks == 2
    bench.router.sent.clear()
    bench.run(get_of(kind))
    bench.finish()
    assert received(bench) == [(n, block(n, LENGTH)) for n in ALL]
    assert bench.nothing_is_left()


def last_of(number: int) -> dict[str, object]:
    """The fields of a put of the last blocks alone."""
    put = put_of("tcp")
    names = ("keys", "lengths", "checksums")
    return {name: getattr(put, name)[-number:] for name in names}


@KINDS
@pytest.mark.parametrize("cut", [leave, clear, drain])
def test_a_get_that_is_cut_off_while_a_tier_reads_pins_nothing(bench, kind, cut):
    reading(bench, kind)
    cut(bench)
    bench.finish()
    if kind == "lease" and cut is leave:
        assert bench.last_reply().code == "unknown_region"
    elif kind == "lease":
        bench.begin(Release(request_id=10, lease=bench.last_reply().lease.number))
    assert bench.nothing_is_left()
    assert bench.answers() == bench.asked


@pytest.mark.parametrize("kind", ["whole", "lease"])
def test_a_get_that_is_dropped_before_the_turn_after_its_read_pins_nothing(bench, kind):
    """The read was complete, and its client had left before the next turn: the pins stayed."""
    reading(bench, kind)
    bench.read_below()
    assert bench.tier.stats().pinned == len(ALL)
    (steps,) = bench.later
    bench.later.clear()
    steps.close()
    assert bench.nothing_is_left()


@pytest.mark.parametrize("kind", ["whole", "stream"])
@pytest.mark.parametrize("cut", [leave, clear, drain, lambda bench: bench.send_queues.cancel_all()])
def test_a_get_that_is_cut_off_while_its_client_does_not_read_pins_nothing(bench, kind, cut):
    sending(bench, kind)
    cut(bench)
    assert bench.nothing_is_left()
    assert bench.answers() == bench.asked


@pytest.mark.parametrize("kind", ["whole", "stream"])
@pytest.mark.parametrize("room", [11, 16])  # with messages two gets have 12 and a bit
def test_what_waits_for_a_client_counts_once_against_what_it_may_have(
    bench, kind, room, monkeypatch
):
    monkeypatch.setattr(bench.gets.in_flight, "per_client", room * LENGTH)
    sending(bench, kind)
    bench.run(get_of(kind))
    code = "too_much_in_flight" if room < 2 * len(ALL) else None
    assert getattr(bench.last_reply(), "code", None) == code
    assert bench.tier.stats().pinned == len(ALL)
    bench.settle()
    bench.run(get_of(kind))
    assert bench.last_reply().hit == len(ALL)
    assert bench.nothing_is_left()


def test_a_message_that_is_half_made_counts_against_the_allowance_of_all(bench, monkeypatch):
    """Sixteen clients' messages, each within the allowance, were made a step of each in turn: the
    process held all of their frames before the first was counted."""
    monkeypatch.setattr(outgoing, "OWN_FRAME_BYTES", LENGTH)
    bench.send_queues.held.replies = Allowance(*(n * outgoing.FRAME_BYTES for n in (7, 8)))
    half_made = found(bench, "whole")
    while bench.tier.stats().pinned < len(ALL):
        next(half_made)
    bench.handle(b"another", protocol.encode(get_of("whole")))
    assert bench.last_reply().code == "too_much_in_flight"
    to_end(half_made)
    assert bench.last_reply().hit == len(ALL)
    assert bench.nothing_is_left()


def release(bench: Bench) -> None:
    bench.begin(Release(request_id=10, lease=bench.last_reply().lease.number))


def expire(bench: Bench) -> None:
    bench.now += 1000


@pytest.mark.parametrize("end", [release, expire, leave])
@pytest.mark.parametrize("between", [clear, drain])
def test_a_leased_get_ends_with_its_lease(bench, end, between):
    sending(bench, "lease")
    between(bench)
    assert in_state(bench.gets.in_state) == ["sending"]
    end(bench)
    assert bench.nothing_is_left()
