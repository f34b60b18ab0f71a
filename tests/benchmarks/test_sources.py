"""The documents this project began from: their figures, and what is put right in them."""

import subprocess
import sys

import pytest

from benchmarks.harness.commands import registry
from benchmarks.harness.source import Table
from benchmarks.sources import kvbench as nixl_study

TABLES = [table for document in registry.documents() for table in document.tables]


def tables_of(benchmark: str) -> list[Table]:
    return [table for table in TABLES if table.benchmark == f"benchmarks.{benchmark}"]


def test_all_five_documents_are_found_and_none_of_them_loads_anything_heavy():
    code = (
        "import sys\nfrom benchmarks.harness.commands import registry\n"
        "print(len(registry.documents()))\n"
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


def test_the_stages_of_the_nixl_study_cannot_be_its_throughput():
    (stages,) = (table for table in tables_of("kvbench") if "Stages" in table.name)
    said, computed = zip(*(row[-2:] for row in stages.rows), strict=True)
    assert said == (12.5, 21.4, 19.5)
    assert computed == (7.7, 10.2, 75.3)
    assert nixl_study.gib_per_s(63, 1_000_000) == pytest.approx(63 * 2.5 / 1024)
