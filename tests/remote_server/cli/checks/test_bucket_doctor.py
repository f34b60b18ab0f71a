"""`kvferry doctor` and the bucket: a wrong one, a missing permission, a missing extra."""

import json
import sys
from typing import Any

import pytest
from bucket_helpers import FaultyObjects, bucket_server, folder_url, hello
from test_bucket import fill
from wire_peer import Peer

from remote_server.cli.__main__ import main
from remote_server.cli.checks import doctor_bucket
from remote_server.protocol import BucketStats, StatsReply, TierStats
from remote_server.store.bucket.objects.client import StoreObjects
from remote_server.store.bucket.objects.objects import Failure

pytestmark = pytest.mark.real_time

NO_SERVER = ["--server", "tcp://127.0.0.1:1"]


@pytest.fixture
def doctor(capsys, monkeypatch):
    """Run it: what it found of the bucket, as pairs of a verdict and a text."""
    monkeypatch.setattr("remote_server.cli.checks.doctor.host_findings", lambda: [])

    def run(*flags):
        main(["doctor", "--json", *NO_SERVER, *flags])
        found = json.loads(capsys.readouterr().out)
        return [(one["verdict"], one["told"]) for one in found if one["check"] == "bucket"]

    return run


def names(url: str) -> list[str]:
    return [one.name for chunk in StoreObjects(url).listing("") for one in chunk]


@pytest.fixture
def folder(tmp_path):
    url = folder_url(tmp_path)
    StoreObjects(url)
    return url


def test_a_bucket_that_is_right_is_written_read_and_left_as_it_was(doctor, folder):
    ((verdict, text),) = doctor("--bucket", folder)
    assert verdict == "ok" and "list, write, read, delete work" in text
    assert names(folder) == []


def test_the_bucket_is_that_of_the_flag_the_variable_or_the_file(
    doctor, folder, monkeypatch, tmp_path
):
    assert doctor() == [], "without a bucket there is nothing to check"
    file = tmp_path / "kvferry.toml"
    file.write_text(f'[servers.a]\nbucket = "{folder}"\n[servers.b]\nbucket = "file:///nowhere"\n')
    assert doctor("--settings", str(file), "--name", "a")[0][0] == "ok"
    assert doctor("--settings", str(file), "--name", "b")[0][0] == "bad"
    monkeypatch.setenv("KVFERRY_BUCKET", folder)
    assert doctor()[0][0] == "ok"
    assert doctor("--bucket", "ftp://blocks")[0][0] == "bad", "the flag wins"


def failing(
    monkeypatch: pytest.MonkeyPatch, folder: str, failure: Failure, *kinds: str
) -> FaultyObjects:
    """Have these kinds of calls of the doctor fail."""
    objects = FaultyObjects(folder)
    for kind in kinds:
        objects.fail(kind, failure)
    monkeypatch.setattr(doctor_bucket, "StoreObjects", lambda url, make: objects)
    return objects


@pytest.mark.parametrize(
    ("kind", "call", "effect"),
    [
        ("list", "list", "found one by one"),
        ("put", "write", "no pack is written"),
        ("read", "read", "no pack is found"),
        ("remove", "delete", "old and damaged packs stay"),
    ],
)
def test_each_permission_that_is_missing_is_named_with_its_effect(
    doctor, folder, monkeypatch, kind, call, effect
):
    failing(monkeypatch, folder, Failure.FORBIDDEN, kind)
    ((verdict, text),) = doctor("--bucket", folder)
    assert verdict == "bad" and f": {call} fails: the credential is missing" in text
    assert effect in text
    left = names(folder)
    assert len(left) == (kind == "remove") and all(name in text for name in left)


def test_a_credential_that_may_do_nothing_is_one_finding_and_a_silent_store_is_asked_once(
    doctor, folder, monkeypatch
):
    failing(monkeypatch, folder, Failure.FORBIDDEN, "list", "put", "read", "remove")
    ((verdict, text),) = doctor("--bucket", folder)
    assert verdict == "bad" and "the credential is missing, has expired or may not" in text
    objects = failing(monkeypatch, folder, Failure.TIMEOUT, "list")
    ((verdict, text),) = doctor("--bucket", folder)
    assert verdict == "bad" and "no answer in time" in text
    assert objects.num_calls == 1


def test_a_missing_extra_and_a_secret_in_the_address_are_named(doctor, monkeypatch):
    ((verdict, text),) = doctor("--bucket", "s3://AKIA:wJalrXU@blocks/kv")
    assert verdict == "bad" and "s3://***@blocks/kv" in text and "wJalrXU" not in text
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    ((verdict, text),) = doctor("--bucket", "s3://blocks")
    assert verdict == "bad" and "pip install '.[bucket]'" in text


def reply(paused_s: float = 0.0, **counters: int) -> StatsReply:
    tier = TierStats(budget_bytes=0, used_bytes=1 << 30, blocks=9, pending=0, pinned=0,
                     free_slabs=0)  # fmt: skip
    return StatsReply(
        request_id=1, protocol=2, epoch="e", server="s", uptime_s=1.0, time_s=0.0,
        tiers={"bucket": tier}, namespaces={}, counters=counters,
        bucket=BucketStats(
            paused_s=paused_s, last_failure="get: forbidden: no", last_failure_s=1.0, names=0,
            packs_waiting=0, writable_bytes=None, calls={},
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("counters", "verdict", "words"),
    [
        ({"bucket_listed": 1, "bucket_names": 1204}, "ok", "1,204 packs"),
        ({}, "note", "has not listed it yet"),
        ({"bucket_listed": 1, "bucket_failed_timeout": 3}, "note", "its start: 3 timeout;"),
        ({"bucket_listed": 1, "bucket_failed_absent": 3}, "ok", "no call failed"),
        ({"paused_s": 1.0, "bucket_failed_forbidden": 2}, "bad", "alone now: get: forbidden: no;"),
    ],
)
def test_the_counts_of_a_running_server_show_the_state_of_its_bucket(counters, verdict, words):
    ((found, text),) = doctor_bucket.of_server(reply(**counters))
    assert found == verdict and words in text


def test_a_server_that_leaves_its_bucket_alone_is_found_by_doctor(
    capsys, context, tmp_path, monkeypatch
):
    monkeypatch.setattr("remote_server.cli.checks.doctor.host_findings", lambda: [])
    url = folder_url(tmp_path)
    with bucket_server(url) as server:
        flags = ["doctor", "--json", "--server", server.endpoint]
        fill(peer := hello(Peer(context, server.endpoint)))
        peer.stats_once(lambda s: s.counters["bucket_packs_written"] == 2)
        main(flags)
        found = {one["check"]: one for one in json.loads(capsys.readouterr().out)}
        assert found["bucket"]["verdict"] == "ok"
        assert "known, budget none, 16 blocks" in found["tier bucket"]["told"]
        tier: Any = server.store.tier_stack.tiers[-1]
        server.loop_calls.call(lambda: tier.context.failed(Failure.FORBIDDEN)).result(30)
        main(flags)
        found = {one["check"]: one for one in json.loads(capsys.readouterr().out)}
        assert found["bucket"]["verdict"] == "bad" and "1 forbidden" in found["bucket"]["told"]
