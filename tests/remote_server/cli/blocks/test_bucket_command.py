"""`kvferry bucket` on a folder and on S3: what it prints, and its exit status."""

import json
import os
import sys

import pytest
from bucket_helpers import ROW_BYTES, RealBucket, chain_of, folder_url
from s3 import s3_server
from wire_peer import block, key

from remote_server.cli.__main__ import main
from remote_server.store.bucket.objects import objects as objects_module
from remote_server.store.bucket.objects.client import StoreObjects
from remote_server.store.bucket.objects.objects import BucketError, Failure
from remote_server.store.bucket.packs.object_names import object_name
from remote_server.store.bucket.upkeep import survey
from remote_server.store.bucket.upkeep.survey import AT_ONCE, at_once

pytestmark = pytest.mark.real_time

ROWS = 24
"""Three packs of eight rows."""

NAMES = [object_name("", "m@1", key(number)) for number in (7, 15, 23)]


@pytest.fixture(scope="module")
def s3():
    with s3_server() as server:
        yield server


@pytest.fixture
def url(request, tmp_path):
    """A bucket with three packs of `m@1` and one object that is no pack. In a folder, if the test
    does not choose S3."""
    if getattr(request, "param", "file") == "file":
        url = folder_url(tmp_path)
    else:
        server, patch = request.getfixturevalue("s3"), request.getfixturevalue("monkeypatch")
        for name, value in server.environment.items():
            patch.setenv(name, value)
        url = f"{server.url}/{request.node.name}".replace("[", "-").replace("]", "")
    fill(url)
    StoreObjects(url).put("v1/=/m=401/00/README", memoryview(b"mine"))
    return url


def fill(url: str, namespace: str = "m@1", tenant: str = "") -> None:
    keys, data = [*map(key, range(ROWS))], [block(number, ROW_BYTES) for number in range(ROWS)]
    with RealBucket(url, tenant=tenant) as bucket:
        bucket.put(keys, data, chain_of(ROWS), namespace)


ALSO_ON_S3 = pytest.mark.parametrize("url", ["file", "s3"], indirect=True)


@pytest.fixture
def kvferry(capsys):
    def run(*arguments):
        status = main(["bucket", *arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def flip(url: str, name: str, offset: int) -> None:
    objects = StoreObjects(url)
    data = bytearray(objects.read(name, 0, objects.size_of(name)))
    data[offset] ^= 1
    objects.put(name, memoryview(data), create=False)


# ── ls, du ───────────────────────────────────────────────────────────────────────────────


@ALSO_ON_S3
def test_ls_lists_namespaces_and_with_one_its_packs_the_newest_first(kvferry, url):
    assert kvferry("ls", url) == (0, "m@1\n", "")
    status, out, _ = kvferry("ls", url, "m@1")
    title, *packs = out.splitlines()
    assert (status, title.split()) == (0, ["key", "rows", "size", "age"])
    assert {line.split()[0] for line in packs} == {key(n).hex() for n in (7, 15, 23)}
    assert all(line.split()[1:4] == ["8", "516.0", "KiB"] for line in packs)
    assert len({len(line) for line in out.splitlines()}) == 1, "the columns are aligned"


def test_ls_shows_at_most_what_its_limit_is_and_how_many_there_are(kvferry, url):
    for age, name in enumerate(NAMES):
        os.utime(f"{url.removeprefix('file://')}/{name}", (5e8, 1.7e9 - 3600 * age))
    status, out, _ = kvferry("ls", url, "m@1", "--limit", "2")
    assert status == 0 and "the newest 2 of 3 packs; --limit COUNT" in out
    assert [line.split()[0] for line in out.splitlines()[1:3]] == [key(7).hex(), key(15).hex()]
    found = json.loads(kvferry("ls", url, "m@1", "--json")[1])
    assert found["total"] == 3
    ages = [pack["age_s"] for pack in found["packs"]]
    assert [round(age - ages[0]) for age in ages] == [0, 3600, 7200], "by the store's clock"


def test_du_adds_up_each_namespace_and_all(kvferry, url):
    fill(url, "other")
    status, out, _ = kvferry("du", url)
    rows = [line.split() for line in out.splitlines()]
    assert status == 0 and rows[0] == ["namespace", "packs", "size", "newest", "oldest"]
    assert [row[:4] for row in rows[1:]] == [
        ["m@1", "3", "1.5", "MiB"], ["other", "3", "1.5", "MiB"], ["all", "6", "3.0", "MiB"]
    ]  # fmt: skip
    found = json.loads(kvferry("du", url, "--json")[1])
    assert (found["packs"], found["bytes"]) == (6, 6 * 516 * 1024)
    assert 0 <= found["namespaces"]["other"]["newest_s"] < 60


def test_each_tenant_has_packs_of_its_own(kvferry, tmp_path):
    url = folder_url(tmp_path)
    fill(url, tenant="blue")
    status, out, err = kvferry("ls", url)
    assert (status, out) == (1, "") and "`--tenant` shows those of 'blue'" in err
    assert kvferry("ls", url, "--tenant", "blue")[:2] == (0, "m@1\n")
    assert kvferry("rm", url, "m@1", "--tenant", "red", "--yes")[0] == 1
    assert kvferry("du", url, "--tenant", "blue", "--json")[0] == 0


# ── rm ───────────────────────────────────────────────────────────────────────────────────


@ALSO_ON_S3
def test_rm_removes_the_packs_of_one_namespace_and_only_when_told_to(kvferry, url):
    fill(url, "other")
    nothing = "kvferry bucket: nothing removed; --yes skips the question\n"
    assert kvferry("rm", url, "m@1") == (1, "", nothing)
    status, _, err = kvferry("rm", url, "m@2", "--yes")
    assert status == 1 and "namespaces with packs: m@1, other" in err
    status, out, _ = kvferry("rm", url, "m@1", "--yes")
    assert status == 0 and out.startswith("removed 3 packs, 1.5 MiB\n") and "kvferry clear" in out
    assert json.loads(kvferry("du", url, "--json")[1])["namespaces"].keys() == {"other"}
    assert StoreObjects(url).size_of("v1/=/m=401/00/README") == 4, "no pack, so not ours"


def test_rm_ends_with_what_is_left_and_why(kvferry, url, monkeypatch):

    def forbidden(*_):
        raise BucketError(Failure.FORBIDDEN, "AccessDenied: no DeleteObject")

    monkeypatch.setattr(StoreObjects, "remove", forbidden)
    status, out, err = kvferry("rm", url, "m@1", "--yes")
    assert (status, out) == (1, "removed 0 packs, 0 B\n")
    assert "3 packs are left: AccessDenied: no DeleteObject; run it again" in err
    found = json.loads(kvferry("rm", url, "m@1", "--yes", "--json")[1])
    assert (found["removed"], found["left"]) == (0, 3)


def test_ctrl_c_ends_rm_with_what_was_removed(kvferry, url, monkeypatch):
    remove, calls = objects_module.Objects.remove, []

    def interrupted(self, names):
        calls.append(names)
        if len(calls) == 2:
            raise KeyboardInterrupt
        remove(self, names)

    monkeypatch.setattr(survey, "REMOVED_AT_ONCE", 1)
    monkeypatch.setattr(StoreObjects, "remove", interrupted)
    assert kvferry("rm", url, "m@1", "--yes")[:2] == (130, "removed 1 packs, 516.0 KiB\n")


# ── verify ───────────────────────────────────────────────────────────────────────────────


@ALSO_ON_S3
def test_verify_finds_every_kind_of_damage_and_removes_it_when_told_to(kvferry, url):
    assert kvferry("verify", url)[:2] == (0, "3 of 3 packs are intact, 1.5 MiB read\n")
    objects = StoreObjects(url)
    whole = bytes(objects.read(NAMES[1], 0, objects.size_of(NAMES[1])))
    flip(url, NAMES[0], 4096 + 3 * ROW_BYTES + 5)
    objects.put(NAMES[1], memoryview(whole[:-1]), create=False)
    objects.put(NAMES[2], memoryview(whole), create=False)
    status, out, _ = kvferry("verify", url, "m@1")
    assert status == 1
    reasons = dict(line.split("  ")[2:] for line in out.splitlines() if line.startswith("damaged"))
    assert reasons == {
        key(7).hex(): "the checksum of row 3 is wrong",
        key(15).hex(): f"{len(whole) - 1} bytes, shorter than its rows",
        key(23).hex(): "it is not the pack of its name",
    }
    assert "`--remove` removes these packs" in out
    found = json.loads(kvferry("verify", url, "--remove", "--json")[1])
    assert (len(found["damaged"]), found["removed"]) == (3, 3)
    assert kvferry("verify", url)[0] == 1, "no packs are left"


def test_verify_finds_objects_that_have_only_the_name_of_a_pack(kvferry, url):
    for name, content in zip(NAMES, (b"", b"x", b"\0" * 8192), strict=True):
        StoreObjects(url).put(name, memoryview(content), create=False)
    status, out, _ = kvferry("verify", url)
    assert status == 1 and "0 of 3 packs are intact" in out


def test_verify_reads_a_sample_of_the_size_that_is_asked_for(kvferry, tmp_path):
    url = folder_url(tmp_path)
    for number in range(4):
        fill(url, f"m@{number}")
    assert json.loads(kvferry("verify", url, "--sample", "5", "--json")[1])["packs"] == 5
    assert json.loads(kvferry("verify", url, "--sample", "50", "--json")[1])["packs"] == 12


def test_a_pack_that_cannot_be_read_is_neither_intact_nor_removed(kvferry, url, monkeypatch):

    def late(*_):
        raise BucketError(Failure.TIMEOUT, "15 s")

    monkeypatch.setattr(StoreObjects, "read_head", late)
    status, out, _ = kvferry("verify", url, "--remove")
    assert status == 1 and out.count("unread") == 3 and "no answer in time (15 s)" in out
    assert "0 of 3 packs are intact" in out
    monkeypatch.undo()
    assert kvferry("verify", url)[0] == 0


def test_no_pack_is_begun_after_the_caller_has_ended():
    begun = []
    for _ in at_once(begun.append, range(1000)):
        break
    assert len(begun) <= 2 * AT_ONCE


def test_progress_is_on_stderr_and_replaced_on_a_terminal(kvferry, url, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    _, out, err = kvferry("verify", url)
    assert out == "3 of 3 packs are intact, 1.5 MiB read\n"
    assert err.startswith("\r\033[K1 packs, 516.0 KiB, 0 damaged") and err.endswith("\r\033[K")
    assert kvferry("verify", url, "--json")[2] == ""


def test_names_in_the_bucket_are_printed_and_not_obeyed(kvferry, tmp_path):
    url = folder_url(tmp_path)
    fill(url, "m\x1b[31m\u202e")
    flip(url, object_name("", "m\x1b[31m\u202e", key(7)), 5000)
    for arguments in (["ls"], ["du"], ["verify"], ["rm", "m"]):
        _, out, err = kvferry(arguments[0], url, *arguments[1:])
        assert "m\\x1b[31m\\u202e" in out + err
        assert "\x1b" not in out + err and "\u202e" not in out + err


# ── mistakes ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("arguments", [["ls"], ["du"], ["verify"], ["rm", "m@1"]])
def test_a_wrong_address_is_wrong_usage_and_makes_nothing(kvferry, arguments):
    action, *rest = arguments
    for address in ("blocks", "ftp://blocks", "s3://k:s@blocks", "file:///nowhere/at/all"):
        status, out, err = kvferry(action, address, *rest)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("kvferry bucket: bucket: ")
    assert not os.path.exists("/nowhere")


def test_a_folder_that_is_missing_is_named_in_plain_words(kvferry, tmp_path):
    status, _, err = kvferry("du", f"file://{tmp_path}/none")
    assert status == 2 and err.endswith("/none: there is no such folder\n")


def test_a_missing_bucket_and_an_absent_store_are_one_sentence(kvferry, s3, monkeypatch):
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    status, out, err = kvferry("du", "s3://nowhere/kv")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "there is no such bucket (NoSuchBucket" in err and "kvferry doctor --bucket" in err
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:1")
    status, _, err = kvferry("du", "s3://nowhere/kv")
    assert (status, err.count("\n")) == (1, 1) and "no connection" in err


@pytest.mark.parametrize("arguments", [["verify", "--sample", "0"], ["ls", "--limit", "-1"], []])
def test_a_wrong_flag_is_wrong_usage(arguments):
    with pytest.raises(SystemExit) as ended:
        main(["bucket", *arguments, "s3://blocks"])
    assert ended.value.code == 2
