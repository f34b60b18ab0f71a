"""The documents this project began from: their figures, and what is put right in them."""

import subprocess
import sys

import pytest

from benchmarks.harness import registry
from benchmarks.harness.source import Table
from benchmarks.kvbench.__main__ import main as kvbench
from benchmarks.remote_kv_cache import source_figures
from benchmarks.sources import kvbench as nixl_study
from benchmarks.store_sweep import source as sweep
from benchmarks.store_sweep.operating import servers_for

TABLES = [table for document in registry.documents() for table in document.tables]


def tables_of(benchmark: str) -> list[Table]:
    return [table for table in TABLES if table.benchmark == f"benchmarks.{benchmark}"]


def corrections(benchmark: str) -> str:
    return "\n".join(f"{c.says}: {c.truth}" for t in tables_of(benchmark) for c in t.corrections)


def test_all_five_documents_are_found_and_none_of_them_loads_anything_heavy():
    code = (
        "import sys\nfrom benchmarks.harness import registry\nprint(len(registry.documents()))\n"
        "print({'torch', 'vllm', 'matplotlib', 'zmq'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["5", "set()"]


def test_each_table_is_whole_and_of_a_benchmark():
    ours = {one.module for one in registry.find().values()}
    for table in TABLES:
        assert table.benchmark in ours | {"benchmarks.storage_workload"}
        assert table.rows and {len(row) for row in table.rows} == {len(table.heads)}, table.name
        for correction in table.corrections:
            assert correction.says and correction.truth and not correction.truth.endswith(".")


def test_every_document_names_itself_and_its_machine():
    documents = registry.documents()
    assert len({document.title for document in documents}) == len(documents)
    assert all(document.machine for document in documents)


def test_the_stages_of_the_nixl_study_cannot_be_its_throughput():
    (stages,) = (table for table in tables_of("kvbench") if "Stages" in table.name)
    said, computed = zip(*(row[-2:] for row in stages.rows), strict=True)
    assert said == (12.5, 21.4, 19.5)
    assert computed == (7.7, 10.2, 75.3)
    assert nixl_study.gib_per_s(63, 1_000_000) == pytest.approx(63 * 2.5 / 1024)


def test_the_blocks_of_the_nixl_study_are_those_of_the_plan(capsys):
    arguments = ["plan", "--models", "r1,70b,llama-3.1-8b", "--requests", "1,10", "--compat"]
    assert kvbench([*arguments, "--format", "csv"]) == 0
    plans = capsys.readouterr().out
    for size, batch in ((562_176, 63), (2_621_440, 63), (1_048_576, 625)):
        assert f",{size},{batch}," in plans
    assert "562,176 and 2,621,440 bytes" in corrections("kvbench")


def test_gets_are_put_right_from_the_documents_own_seconds():
    (table,) = tables_of("remote_kv_cache.baseline.test_server")
    place = table.heads.index("get / naive")
    assert [row[place] for row in table.rows] == [5.9, 8.0, 8.5, 7.2, 8.3]
    assert [round(f.get / f.naive, 1) for f in source_figures.SERVER.values()] == [
        row[place] for row in table.rows
    ]
    deferred = [f"{f.delta_set_deferred}" for f in source_figures.SERVER.values()]
    assert ", ".join(deferred) in corrections("remote_kv_cache.baseline.test_server")


def test_long_prefill_has_the_documents_twelve_rows():
    (table,) = tables_of("remote_kv_cache.test_long_prefill")
    assert [*table.heads] == ["run", "2", "4", "8", "16", "32", "64", "128"]
    assert [row[0] for row in table.rows][::11] == [
        "1. remote+prefix_caching-1", "12. remote+no_prefix_caching-6"
    ]  # fmt: skip
    assert [row[1] for row in table.rows][:7] == [0.88, 47.94, 48.69, 5.54, 48.28, 48.8, 0.89]


def test_the_sweep_moved_a_gigabyte_a_second_and_its_plan_is_19_servers_or_14():
    assert "0.92 GB/s" in corrections("store_sweep")
    assert servers_for(1_000_000, 55_000) == 19
    (at_32,) = (r for r in sweep.results() if r.point.concurrency == 32)
    assert at_32.read.p50 == 25.96 and servers_for(1_000_000, at_32.tokens_per_s) == 14


def test_the_storage_tools_models_and_the_example_that_was_not_measured():
    sizes, example = tables_of("storage_workload")
    assert {str(row[0]): row[1:] for row in sizes.rows} == {
        "tiny-1b": [24_576, 192], "mistral-7b": [131_072, 1024], "llama3.1-8b": [131_072, 1024],
        "llama2-7b": [524_288, 4096], "llama3.1-70b-instruct": [327_680, 2560],
    }  # fmt: skip
    seconds_of_a_request = 489_231 / 2_847 * 0.030
    assert round(seconds_of_a_request, 1) == 5.2
    noted = corrections("storage_workload")
    for note in ("12 layers", "--cpu-mem-gb 4", "11 workloads", "validate.sh", "PASS or FAIL"):
        assert note in noted, note
    assert len(example.rows) == 7
