"""Tenants of one server, over real sockets: what one can do to another, which is nothing."""

import os
from contextlib import suppress
from functools import partial

import pytest
import zmq
from descriptors import open_fds
from fake_server import eventually
from gates import copies_held
from shared_messages import shared_get, shared_put
from tenancy import tenancy
from wire_peer import BLOCK_BYTES, Peer, Refused, SharedPeer, block, key

from remote_server import protocol
from remote_server.errors import ConfigError
from remote_server.keys import make_keys
from remote_server.server.server import Server
from remote_server.server.tenant.tenant import namespaces_named
from remote_server.server.upkeep.loop_calls import clear_blocks
from remote_server.values import MiB

pytestmark = pytest.mark.real_time

assert tenancy

ABSENT, READABLE = bytes([0]), bytes([2])


@pytest.fixture
def two(tenancy):
    """Two tenants whose blocks have equal keys in namespaces of one name."""
    tenancy.start()
    a, b = tenancy.peer("a"), tenancy.peer("b")
    a.hello()
    b.hello()
    return a, b


def test_equal_prompts_in_equal_namespaces_of_two_tenants_never_share_a_block(two):
    a, b = two
    assert a.put(range(4)).created == 4
    assert b.lookup(range(4)).states == ABSENT * 4
    assert b.get(range(4))[0].found == []
    assert b.put([0], length=100).created == 1, "and not existed"
    assert a.get([0])[1] == [(0, block(0))]
    assert b.get([0])[1] == [(0, block(0, 100))]


def test_clear_and_prefetch_find_a_namespace_by_its_full_name_alone(two, tenancy):
    server = tenancy.server
    for full_name, found in (
        ("ns", []),
        ("c/ns", []),
        ("a/ns", [("a", "ns")]),
        (None, [("a", "ns"), ("b", "ns")]),
    ):
        two[0].put(range(3))
        two[1].put(range(3))

        def names(full_name=full_name):
            return [(tenant.name, name)
                    for tenant, name in namespaces_named(server.tenants, full_name)]  # fmt: skip

        assert server.loop_calls.call(names).result(30) == found
        if full_name is not None:
            begin = partial(server.prefetches.begin, full_name, [key(0)])
            assert (server.loop_calls.call(begin).result(30) is not None) == bool(found)
        clear = partial(clear_blocks, server.tenants, full_name)
        cleared = server.loop_calls.call(clear).result(30)
        assert (cleared[0]["memory"] if cleared is not None else 0) == 3 * len(found)


def test_no_request_of_a_tenant_touches_what_another_has(two, tenancy):
    a, b = two
    a.put(range(3))
    keys = [key(number) for number in range(3)]
    for message in (
        protocol.Touch(request_id=b.next_id(), namespace="ns", keys=keys),
        protocol.Verify(request_id=b.next_id(), namespace="ns", keys=keys),
        protocol.Clear(request_id=b.next_id(), namespace="ns"),
        protocol.Clear(request_id=b.next_id(), namespace="ns", forget=True),
        protocol.Clear(request_id=b.next_id()),
    ):
        b.ask(message)
    assert a.lookup(range(3)).states == READABLE * 3
    assert b.put([0]).code == "unknown_namespace", "its own is forgotten"
    assert a.put([9]).created == 1, "and not a's"
    stats = b.stats()
    assert stats.namespaces == {}
    assert stats.tiers["memory"].blocks == 0
    assert stats.tiers["memory"].budget_bytes == 4 * MiB
    assert stats.counters["put_total"] == 0
    assert a.stats().counters["removed"] == 0


def test_a_tenant_that_fills_or_pins_all_of_its_memory_takes_nothing_from_another(tenancy):
    tenancy.write(a='memory = "1MiB"', b='memory = "1MiB"')
    tenancy.start()
    a, greedy = tenancy.peer("a"), SharedPeer(tenancy.peer("b"), namespace="ns")
    a.hello()
    a.put(range(8))
    full = 1 * MiB // BLOCK_BYTES
    for first in range(0, 2 * full, 64):
        greedy.put(range(first, first + 64))
    stats = greedy.peer.stats()
    assert stats.tiers["memory"].used_bytes <= 1 * MiB
    assert stats.counters["evicted"] > 0
    assert greedy.lease(range(full, 2 * full)).hit == full
    assert greedy.peer.put([9999]).declined == {"no_slot": 1}
    assert a.lookup(range(8)).states == READABLE * 8
    assert a.stats().counters["evicted"] == 0
    assert a.put(range(8, full)).created == full - 8


def test_every_request_in_a_namespace_that_the_key_does_not_allow_is_refused(tenancy):
    tenancy.write(a='namespaces = ["team-a", "shared/"]', b="")
    server = tenancy.start()
    peer = tenancy.peer("a")
    guest = SharedPeer(peer, namespace="team-a/model")
    assert guest.put([1], namespace="team-a/model").created == 1
    for allowed in ("shared/x", "kvferry/canary/1234"):  # the latter every engine tries at start
        assert peer.hello(allowed).protocol == 2
    known = [*server.tenants["a"].store.namespaces.known]
    keys, put = [key(1)], {"lengths": [BLOCK_BYTES], "checksums": [0]}
    for namespace in ("other", "tea", "x", "Team-a"):
        shared = {"region": guest.token, "namespace": namespace, "keys": keys}
        messages = [
            protocol.Hello(request_id=1, protocol=2, namespace=namespace, block_bytes=4096),
            protocol.Lookup(request_id=1, namespace=namespace, keys=keys),
            protocol.Get(request_id=1, namespace=namespace, keys=keys),
            protocol.Get(request_id=1, namespace=namespace, keys=keys, stream=False),
            protocol.Touch(request_id=1, namespace=namespace, keys=keys),
            protocol.Verify(request_id=1, namespace=namespace, keys=keys),
            protocol.Keep(request_id=1, namespace=namespace, keys=keys),
            protocol.Keep(request_id=1, namespace=namespace, keep=False),
            protocol.Clear(request_id=1, namespace=namespace),
            shared_put(request_id=1, offsets=[0], ticket=1, ticket_value=1, **put, **shared),
            shared_get(request_id=1, **shared),
        ]
        for message in messages:
            reply = peer.ask(message)
            assert (type(reply), reply.code) == (protocol.Error, "forbidden_namespace"), message
        refused = protocol.Put(request_id=1, namespace=namespace, keys=keys, **put)
        assert peer.ask(refused, block(1)).code == "forbidden_namespace"
    counters = server.tenants["a"].store.counters
    assert counters["refused_forbidden_namespace"] == 4 * (len(messages) + 1)
    assert [*server.tenants["a"].store.namespaces.known] == known


# ── shared memory ────────────────────────────────────────────────────────────────────────────


def test_arenas_regions_and_leases_of_one_tenant_mean_nothing_to_another(tenancy):
    tenancy.write(a='memory = "1MiB"', b='memory = "1MiB"')
    server = tenancy.start()
    a, b = (SharedPeer(tenancy.peer(name), namespace="ns") for name in "ab")
    a.put(range(5))
    assert a.get(range(5)) == [block(number) for number in range(5)]
    assert block(1)[:64] in a.arena[:]
    assert not any(b.arena[:]), "untouched, words and all"
    held = a.lease([1])
    assert held.hit == 1
    b.peer.send(protocol.Release(request_id=b.peer.next_id(), lease=held.lease.number))
    assert b.lease([1], region=a.token).code == "unknown_region"
    assert b.lease([1], release=[held.lease.number]).hit == 0
    stolen = b.put_message([2], region=a.token)
    assert b.peer.ask(stolen).code == "unknown_region"
    assert len(server.tenants["a"].leases) == 1
    assert b.peer.stats().counters["releases_unknown"] == 2


def test_a_process_without_the_secret_of_the_session_attaches_nothing(tenancy):
    """Same host, same user, and it knows the socket's name: the kernel lists it."""
    server = tenancy.start()
    a, b = tenancy.peer("a"), tenancy.peer("b")
    of_another = b.hello().local_secret
    assert len(of_another) == 32
    for secret in (b"", b"x" * 32, of_another):
        with pytest.raises(Refused, match="secret"):
            SharedPeer(a, namespace="ns", secret=secret)
    assert a.stats().counters["regions_refused"] == 3
    assert len(server.tenants["a"].regions) == 0
    assert SharedPeer(a, namespace="ns").token


# ── who is let in ────────────────────────────────────────────────────────────────────────────


def silent(peer: Peer) -> bool:
    """Whether nothing comes back, in the time in which all else here is answered."""
    return not peer.socket.poll(300)


def knock(peer: Peer) -> None:
    """Ask for statistics. A peer that was refused before it asks has no connection to ask by."""
    peer.socket.sndtimeo = 300
    with suppress(zmq.Again):
        peer.send(protocol.Stats(request_id=1))


def test_an_unknown_key_gets_no_connection_holds_nothing_and_is_counted(tenancy):
    server = tenancy.start()
    public, secret = zmq.curve_keypair()
    stranger = Peer(
        tenancy.context, server.endpoint, curve_serverkey=tenancy.server_key,
        curve_publickey=public, curve_secretkey=secret, immediate=True, sndtimeo=300,
    )  # fmt: skip
    with pytest.raises(zmq.Again):  # there is no connection that could take it
        stranger.hello()
    known = tenancy.peer("a")
    stats = known.stats_once(lambda stats: stats.counters["peers_refused_unknown_key"] >= 1)
    assert stats.namespaces == {}
    assert server._auth.num_connections == 1
    assert all(not tenant.store.namespaces.known for tenant in server.tenants.values())


def test_a_peer_without_keys_or_that_believes_in_another_server_gets_no_connection(tenancy):
    server = tenancy.start()
    plain = Peer(tenancy.context, server.endpoint)
    lost = tenancy.peer("a", server_key=zmq.curve_keypair()[0])
    for number, peer in enumerate((plain, lost), 1):
        knock(peer)
        known = tenancy.peer("b")
        known.stats_once(lambda stats: stats.counters["peers_refused_handshake"] >= number)  # noqa: B023
    assert silent(plain) and silent(lost)


def test_a_connection_that_names_itself_is_not_served_by_a_server_with_tenants(tenancy):
    """The name could be one that another tenant's replies still wait for."""
    server = tenancy.start()
    named = tenancy.peer("b", routing_id=b"12345")
    named.send(protocol.Stats(request_id=1))
    known = tenancy.peer("a")
    known.stats_once(lambda stats: stats.counters["refused_routing_id"] == 1)
    assert silent(named)
    assert server.tenants["b"].send_queues._queues == {}


# ── keys come and go ─────────────────────────────────────────────────────────────────────────


def test_a_key_is_added_and_withdrawn_while_the_server_runs(tenancy):
    now = [0.0]
    make_keys(tenancy.folder, ["a"], "new")
    tenancy.write(a="", b="")
    server = tenancy.start(clock=lambda: now[0])
    old = tenancy.peer("a")
    old.hello()
    old.put([1])
    both = [tenancy.public_key(name) for name in ("a", "a-new")]
    tenancy.write(a=f'keys = ["{both[0]}", "{both[1]}"]', b="")
    now[0] += 10
    tenancy.peer("b").stats()  # a turn of the loop
    assert tenancy.peer("a-new").get([1])[1] == old.get([1])[1] == [(0, block(1))]
    tenancy.write(a=f'keys = ["{both[1]}"]', b="")
    assert old.lookup([1]).states == READABLE, "nobody has looked yet"
    now[0] += 10
    tenancy.peer("b").stats()
    reply = old.lookup([1])
    assert (type(reply), reply.code) == (protocol.Error, "revoked_key")
    assert old.put([2]).code == "revoked_key"
    new = tenancy.peer("a-new")
    assert new.lookup([1, 2]).states == READABLE + ABSENT
    assert new.stats().counters["refused_revoked_key"] == 2
    again = tenancy.peer("a")
    knock(again)
    new.stats_once(lambda stats: stats.counters["peers_refused_unknown_key"] >= 1)
    assert silent(again)
    assert [*server.tenants] == ["a", "b"]


def test_a_tenants_file_that_breaks_while_the_server_runs_changes_nothing(tenancy, caplog):
    now = [0.0]
    tenancy.start(clock=lambda: now[0])
    peer = tenancy.peer("a")
    peer.hello()
    (tenancy.folder / "tenants.toml").write_text("[a")
    now[0] += 10
    peer.stats()
    assert peer.put([1]).created == 1
    assert "is not used" in caplog.text
    make_keys(tenancy.folder, ["c"])
    tenancy.write(a="", c="")
    now[0] += 10
    peer.stats()
    newcomer = tenancy.peer("c")
    knock(newcomer)
    peer.stats_once(lambda stats: stats.counters["peers_refused_unknown_key"] >= 1)
    assert silent(newcomer)
    assert "tenants c are added when the server starts again" in caplog.text


def test_a_tenants_disk_is_its_own_and_comes_back_to_it_alone(tenancy, tmp_path):
    def quotas() -> dict[str, str]:
        return {"a": 'disk = "16MiB"', "b": 'disk = "16MiB"'}

    disk = {"disk": str(tmp_path / "disk"), "disk_bytes": 32 * MiB}
    tenancy.write(**quotas())
    tenancy.start(**disk)
    a = tenancy.peer("a")
    a.hello()
    a.put(range(3))
    a.stats_once(lambda stats: stats.counters["disk_written"] == 3)
    tenancy.stop()
    tenancy.write(**quotas())
    tenancy.start(**disk)
    a, b = tenancy.peer("a"), tenancy.peer("b")
    a.stats_once(lambda stats: stats.counters["disk_recovered"] == 3)
    assert b.lookup(range(3)).states == ABSENT * 3
    assert b.stats().tiers["disk"].blocks == 0
    assert b.get(range(3))[1] == []
    assert a.get(range(3))[1] == [(number, block(number)) for number in range(3)]
    assert sorted(os.listdir(tmp_path / "disk")) == ["tenant-a", "tenant-b"]


def test_a_server_that_cannot_start_for_one_tenant_holds_nothing_of_the_others(tenancy, tmp_path):
    tenancy.write(a='disk = "16MiB"', b='disk = "1MiB"')
    config = tenancy.config(disk=str(tmp_path / "disk"), disk_bytes=32 * MiB)
    before = open_fds()
    with pytest.raises(ConfigError, match="below the least"):
        Server(config).start()
    # Threads of earlier tests may still close theirs.
    eventually(lambda: open_fds() <= before, "no descriptor is kept")


def test_what_connections_hold_is_shown_by_tenant(tenancy):
    tenancy.write(a='memory = "4MiB"', b='memory = "4MiB"')
    server = tenancy.start()
    a, b = tenancy.peer("a"), tenancy.peer("b")
    a.hello(fingerprint={"model": "m"})
    assert not server._serving._is_fair_already, "their requests take turns"
    with copies_held(server):
        a.put([1], deferred=True)
        b.stats()
        held = server.loop_calls.call(server.snapshot).result(30).held
    assert held["a"].fingerprints > held["b"].fingerprints == 0
    assert held["a"].uncopied == held["a"].largest[0].uncopied > held["b"].uncopied == 0
