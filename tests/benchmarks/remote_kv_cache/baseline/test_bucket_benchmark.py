"""The benchmark of the bucket, and the sweep with a real store behind its server. Nothing here is
about speed."""

import json
from pathlib import Path

import pytest

from benchmarks.harness.runner import WrongBytes
from benchmarks.remote_kv_cache.baseline import test_bucket_speed as bucket_speed
from benchmarks.remote_kv_cache.baseline.bucket.bare_calls import Bare
from benchmarks.remote_kv_cache.baseline.bucket.bucket_tier import Tier
from benchmarks.remote_kv_cache.baseline.bucket.packs import Load
from benchmarks.remote_kv_cache.work import object_stores
from benchmarks.store_sweep.__main__ import main as sweep
from remote_server.store.bucket.objects.client import StoreObjects

pytestmark = pytest.mark.real_time

pytest.importorskip("obstore", reason="the extra kvferry[bucket] is not installed")

SMALL = ["--trials", "1", "--warm-ups", "0", "--total", "512KiB", "--row", "16KiB",
         "--pack", "128KiB"]  # fmt: skip


def test_all_ways_move_the_bytes_and_their_record_has_speed_and_cpu(tmp_path: Path, capsys):
    stores = tmp_path / "stores"
    stores.mkdir()
    arguments = [*SMALL, "--stores", "disk,nothing://there", "--directory", str(stores)]
    files = ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.svg")]
    assert bucket_speed.main([*arguments, *files]) == 0
    record = json.loads((tmp_path / "a.json").read_text())
    rows = {(row["model"], row["operation"]): row for row in record["rows"]}
    for way in ("bare calls", "bucket tier", "through servers"):
        for direction in ("put", "get"):
            assert rows["disk", f"{way}: {direction}"]["bytes"] == 512 << 10
            assert rows["disk", f"{way}: {direction}"].get("failed") is None
    assert rows["disk", "bucket tier: get"]["wall"] == "bare calls: get"
    assert "nothing://there" in rows["nothing://there", "bare calls"]["skipped"]
    assert {figure["unit"] for figure in record["figures"]} == {"CPU s/GiB"}
    assert len(record["figures"]) == 6
    assert [*stores.iterdir()] == [], "left behind"
    assert "of bare" in capsys.readouterr().out


def test_the_objects_of_the_tier_are_as_large_as_those_of_the_bare_calls(tmp_path: Path):
    load = Load(512 << 10, 16 << 10, 128 << 10)
    with object_stores.opened("disk", tmp_path) as store:
        sizes = []
        for way in (Bare(store, load, 2), Tier(store, load, 2)):
            way.clear()
            way.write()
            listed = [one for chunk in StoreObjects(store.url).listing("") for one in chunk]
            sizes.append(sorted(one.num_bytes for one in listed))
            way.close()
    assert sizes[0] == sizes[1] == [load.objects.shape[1]] * 4


def test_bytes_that_came_back_wrong_void_a_way(tmp_path: Path):
    load = Load(256 << 10, 16 << 10, 128 << 10)
    with object_stores.opened("disk", tmp_path) as store:
        way = Bare(store, load, 2)
        way.write()
        way.verify()
        load.objects[1, -1] ^= 1
        with pytest.raises(WrongBytes, match="object 1"):
            way.verify()
        way.close()


def test_a_row_that_does_not_fill_pages_or_packs_is_refused(capsys):
    for row in ("1000", "48KiB"):
        assert bucket_speed.main([*SMALL, "--row", row, "--stores", "disk"]) == 2
    assert "power of two of rows" in capsys.readouterr().err


def test_a_sweep_reads_every_block_from_the_store(tmp_path: Path, capsys):
    json_file = tmp_path / "sweep.json"
    stores = tmp_path / "stores"
    stores.mkdir()
    arguments = ["--concurrency", "1x2", "--seconds", "0.3", "--rounds", "1", "--block-bytes",
                 "64KiB", "--bucket", "disk", "--directory", str(stores)]  # fmt: skip
    assert sweep([*arguments, "--json", str(json_file)]) == 0
    record = json.loads(json_file.read_text())
    objects = record["parameters"]["objects"].replace(",", "").split()
    read, written = int(objects[0]), int(objects[3])
    assert read == 10 * written / 3, "of a conversation three blocks are written and ten read"
    assert record["figures"][0]["values"]["errors"] == 0
    assert "object store: each block is an object" in capsys.readouterr().out
    assert [*stores.iterdir()] == [], "left behind"


def test_a_bucket_and_an_emulated_delay_exclude_each_other(capsys):
    arguments = ["--bucket", "disk", "--storage-latency-ms", "20", "--concurrency", "1"]
    assert sweep(arguments) == 2
    assert "bucket: is read in truth" in capsys.readouterr().err
    assert not [*Path().glob("kvferry-????????")]
