"""A drain into the bucket: what memory and disk hold is found by other servers afterwards."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from admin_http import served, write_token
from bucket_helpers import ROW_BYTES, ROW_TOKENS, folder_url, hello
from wire_peer import Peer, block

from remote_server.cli.__main__ import main
from remote_server.cli.exit_status import NoServer
from remote_server.cli.serving import drain as drain_command
from remote_server.errors import KVFerryError
from remote_server.protocol import Stretch
from remote_server.server.upkeep.loop_calls import drain_to_bucket, drained
from remote_server.store.bucket.down import drain as drain_module
from remote_server.store.bucket.objects.objects import BucketError, Failure

pytestmark = pytest.mark.real_time

MiB = 1 << 20
PROMPTS = 6
SHARED, ROWS = 12, 44
"""Rows of a prompt, and how many of them all prompts have in common: a pack and a half, so that
equal places hold rows of many prompts."""

SETTINGS = {"memory": 8 * MiB, "disk_bytes": 160 * MiB, "disk_write_rate": 0}


def prompt(number: int) -> list[int]:
    return [*range(SHARED), *range(1000 * (number + 1) + SHARED, 1000 * (number + 1) + ROWS)]


def stretch(first: int, rows: int) -> list[Stretch]:
    return [Stretch(rows, 0, first * ROW_TOKENS, ROW_TOKENS)]


def put_prompts(peer: Peer, prompts: range, *, first_part: int = 19) -> None:
    """As engines do: a lookup of all, then puts of what is missing, in parts that no pack begins
    or ends with."""
    for number in prompts:
        rows = prompt(number)
        known = peer.lookup(rows, chain=stretch(0, ROWS)).prefix
        for begin, end in ((known, first_part), (first_part, ROWS)):
            if begin < end:
                peer.put(rows[begin:end], length=ROW_BYTES, chain=stretch(begin, end - begin))


PACKS = PROMPTS * 4
"""Four whole ones of each prompt, whose last four rows are a tail. The common pack is in the bucket
already: a second lookup has found it."""


def found_by(server, context, prompts: range) -> int:
    """Rows of whole packs that a server without memory and disk of the first finds and reads."""
    peer = hello(Peer(context, server.endpoint))
    peer.stats_once(lambda s: s.counters["bucket_listed"] == 1)
    num = 0
    for number in prompts:
        rows = prompt(number)
        headers = peer.stats().counters["bucket_headers_read"]
        peer.lookup(rows, chain=stretch(0, ROWS))
        packs = (ROWS // 8) - (number > 0)  # the header of the common one is read once
        peer.stats_once(lambda s: s.counters["bucket_headers_read"] >= headers + packs)  # noqa: B023
        prefix = peer.lookup(rows, chain=stretch(0, ROWS)).prefix
        _, arrived = peer.get(rows[:prefix])
        num += sum(data == block(rows[place], ROW_BYTES) for place, data in arrived)
    return num


@pytest.fixture
def token(tmp_path):
    return write_token(tmp_path)


class Ran(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def kvferry(capsys):
    """`kvferry drain --to-bucket` on the server of an admin HTTP."""

    def run(admin, token: str, *flags: str) -> Ran:
        drain = ["drain", admin.url, "--to-bucket", "--admin-token-file", token]
        return Ran(main([*drain, *flags]), *capsys.readouterr())

    return run


def wait_for_disk(peer: Peer) -> None:
    rows = SHARED + PROMPTS * (ROWS - SHARED)
    peer.stats_once(lambda s: s.counters["disk_written"] == rows)


def test_after_a_drain_another_machine_finds_every_complete_pack(context, tmp_path, token, kvferry):
    """Rows that memory has evicted are on disk: the prompts are more than the memory."""
    url, disk = folder_url(tmp_path), tmp_path / "disk"
    with served(bucket=url, disk=str(disk), admin_token_file=token, **SETTINGS) as (first, admin):
        put_prompts(peer := hello(Peer(context, first.endpoint)), range(PROMPTS))
        wait_for_disk(peer)
        peer.stats_once(lambda s: s.counters["bucket_packs_written"] == 1)
        ran = kvferry(admin, token, "--json")
        assert (ran.returncode, ran.stderr) == (0, "")
        done = json.loads(ran.stdout)
        assert (done["written"], done["left"], done["incomplete"]) == (PACKS, 0, 0)
        assert peer.put([9999], length=ROW_BYTES).declined == {"draining": 1}
        assert peer.lookup(prompt(0), chain=stretch(0, ROWS)).prefix == ROWS, "it serves reads"
        again = json.loads(kvferry(admin, token, "--json").stdout)
        assert (again["written"], again["left"]) == (0, 0), "all are there"
    shutil.rmtree(disk)
    with served(bucket=url, memory=64 * MiB) as (second, _):
        assert found_by(second, context, range(PROMPTS)) == PROMPTS * (ROWS // 8 * 8)


def test_a_drained_server_has_its_blocks_again_and_they_can_be_drained_into_the_bucket(
    context, tmp_path, token, kvferry, capsys
):
    """It is drained right after the last put: the drain waits for what the disk has not got. A
    place in a prompt names no prompt: each row keeps the number of the one before it. The write
    rate does not hold the drain into the bucket back."""
    url, disk = folder_url(tmp_path), str(tmp_path / "disk")
    settings = {"disk": disk, "admin_token_file": token, **SETTINGS, "memory": 64 * MiB}
    with served(**settings, bucket=url) as (server, admin):
        put_prompts(hello(Peer(context, server.endpoint)), range(PROMPTS))
        assert main(["drain", admin.url, "--json", "--admin-token-file", token]) == 0
        assert json.loads(capsys.readouterr().out) == {"draining": True, "ends_within_s": 5.0}
        assert server.wait_until_drained(60)
    with served(**settings, bucket=url, bucket_write_rate=1) as (restarted, admin):
        done = json.loads(kvferry(admin, token, "--json").stdout)
        assert restarted.loop_calls.call(lambda: drained(restarted.tenants)).result(30).is_over
        assert (done["left"], done["incomplete"]) == (0, 0)
        assert PACKS <= done["written"] <= PACKS + 1, "the common one may be there already"
    with served(bucket=url, memory=64 * MiB) as (second, _):
        assert found_by(second, context, range(PROMPTS)) == PROMPTS * (ROWS // 8 * 8)


def test_a_pack_is_never_put_together_from_rows_of_two_prompts(context, tmp_path, token, kvferry):
    """The first prompt's rows are gone; those of the second have the same places."""
    url = folder_url(tmp_path)
    with served(bucket=url, admin_token_file=token, memory=16 * MiB) as (server, admin):
        peer = hello(Peer(context, server.endpoint))
        rows = prompt(1)
        peer.put(rows[:16], length=ROW_BYTES, chain=stretch(0, 16))
        other = prompt(2)
        peer.put(other[20:24], length=ROW_BYTES, chain=stretch(20, 4))
        peer.put(rows[16:20], length=ROW_BYTES, chain=stretch(16, 4))
        done = json.loads(kvferry(admin, token, "--json").stdout)
        assert (done["written"], done["incomplete"]) == (2, 1)


def test_a_drain_ends_when_the_bucket_is_away_and_goes_on_when_it_is_back(
    context, tmp_path, token, monkeypatch, kvferry
):
    monkeypatch.setattr(drain_module, "GIVE_UP_S", 0.5)
    url = folder_url(tmp_path)
    folder = Path(url.removeprefix("file://"))
    with served(bucket=url, admin_token_file=token, memory=64 * MiB) as (server, admin):
        put_prompts(peer := hello(Peer(context, server.endpoint)), range(PROMPTS))
        peer.stats_once(lambda s: s.counters["bucket_packs_written"] == 1)
        tier: Any = server.store.tier_stack.tiers[-1]
        put = tier.context.objects.put

        def away(*_: object, **__: object) -> bool:
            raise BucketError(Failure.UNREACHABLE, "refused")

        tier.context.objects.put = away
        ran = kvferry(admin, token)
        assert ran.returncode == 1
        assert f"{PACKS} packs are left" in ran.stderr and "run it again" in ran.stderr
        assert peer.lookup(prompt(0), chain=stretch(0, ROWS)).prefix == ROWS
        tier.context.objects.put = put
        monkeypatch.setattr(drain_module, "GIVE_UP_S", 60.0)
        ran = kvferry(admin, token)
        assert (ran.returncode, ran.stderr) == (0, "")
        assert ran.stdout.startswith(f"{PACKS} packs written, ")
        assert sum(each.is_file() for each in folder.rglob("*/??/*")) == PACKS + 1


def test_a_second_call_while_it_drains_begins_no_second_walk(context, tmp_path, token):
    with served(bucket=folder_url(tmp_path), memory=64 * MiB) as (server, _):
        put_prompts(hello(Peer(context, server.endpoint)), range(2))
        (tenant,) = server.tenants.values()

        def twice():
            begun = drain_to_bucket(server.tenants)
            walk = tenant.storage.drain
            again = drain_to_bucket(server.tenants)
            return begun, again, walk is tenant.storage.drain

        begun, again, is_same = server.loop_calls.call(twice).result(30)
        assert begun == again and is_same


def test_a_server_without_a_bucket_a_token_or_an_answer_is_named(context, tmp_path, token, kvferry):
    with served(admin_token_file=token) as (_, admin):
        ran = kvferry(admin, token)
        assert (ran.returncode, ran.stdout) == (1, "") and "has no bucket" in ran.stderr
        (tmp_path / "wrong").write_text("another token of enough characters".replace(" ", "-"))
        ran = kvferry(admin, str(tmp_path / "wrong"))
        assert ran.returncode == 1 and "--admin-token-file" in ran.stderr
    ran = kvferry(admin, token)
    assert ran.returncode == 3 and f"no answer from the admin HTTP at {admin.url}" in ran.stderr


def test_the_words_of_an_admin_http_are_printed_plain(monkeypatch, capsys):
    def refuse(self, method, path, body=None):
        raise KVFerryError("no\x1b[31m\u202e")

    monkeypatch.setattr(drain_command.Admin, "ask", refuse)
    assert main(["drain", "http://127.0.0.1:1", "--admin-token-file", ""]) == 1
    assert capsys.readouterr().err == "kvferry drain: no\\x1b[31m\\u202e\n"


def test_a_server_that_answers_late_once_is_asked_again(monkeypatch, capsys):
    replies = [{"is_over": False}, None, {"is_over": True, "left": 0}]
    progress = {"written": 3, "written_bytes": 9, "left": 1, "looked_at": 5, "incomplete": 0}

    def ask(self, method, path, body=None):
        reply = replies.pop(0)
        if reply is None:
            raise NoServer("the loop did not answer")
        return progress | reply

    monkeypatch.setattr(drain_command, "POLL_S", 0.0)
    monkeypatch.setattr(drain_command.Admin, "ask", ask)
    assert main(["drain", "http://127.0.0.1:1", "--to-bucket", "--admin-token-file", ""]) == 0
    assert capsys.readouterr().out.startswith("3 packs written, 9 B, in ")
