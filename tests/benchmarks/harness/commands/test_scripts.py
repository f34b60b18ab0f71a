"""`python -m benchmarks run NAME` with the names that the source documents use."""

import importlib.util

import pytest

from benchmarks.__main__ import main
from benchmarks.harness.commands import registry
from benchmarks.harness.commands.scripts import command_of, scripts

# Commands and files as the five documents write them.
OF_THE_SOURCES = {
    "python -m benchmarks.remote_kv_cache.baseline.test_memory_io": "test_memory_io",
    "python -m benchmarks.remote_kv_cache.baseline.test_zmq_transfer": "test_zmq_transfer",
    "python -m benchmarks.remote_kv_cache.baseline.test_server": "test_server",
    "python -m benchmarks.remote_kv_cache.test_transfer_out": "test_transfer_out",
    "python -m benchmarks.remote_kv_cache.test_transfer_in": "test_transfer_in",
    "python -m benchmarks.remote_kv_cache.test_long_prefill": "test_long_prefill",
    "kvbench": "kvbench",
}
WITH_ARGUMENTS = {
    "kv-cache.py": ["benchmarks.storage_workload"],
    "./kv-cache-wrapper.sh": ["benchmarks.storage_workload", "suite"],
    "kv-cache_sharegpt_replay.py": ["benchmarks.storage_workload"],
    "validate.sh": ["benchmarks.storage_workload", "validate"],
    "benchmark/scripts/full_6sys_bench.sh": ["benchmarks.six_systems"],
    "nixlbench": ["benchmarks.kvbench", "run", "--ways", "nixl,gds"],
}


def test_every_command_of_a_source_document_finds_its_benchmark(monkeypatch: pytest.MonkeyPatch):
    found = registry.find()
    monkeypatch.setattr(registry, "find", lambda: found)
    for command, name in OF_THE_SOURCES.items():
        assert command_of(command.rpartition(" ")[2]) == [found[name].module], command
    for script, words in WITH_ARGUMENTS.items():
        assert command_of(script) == words


def test_every_script_leads_to_a_module_that_is_here_and_hides_no_benchmark():
    for script, (module, *_) in scripts().items():
        assert importlib.util.find_spec(module), script
    assert not scripts().keys() & registry.find().keys()


def test_run_prints_the_command_that_takes_its_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def take_over(_: str, words: list[str]) -> None:
        raise SystemExit(" ".join(words[1:]))

    monkeypatch.setattr("os.execv", take_over)
    command = "-m benchmarks.storage_workload suite -w cpu-only -t 30"
    with pytest.raises(SystemExit, match=f"^{command}$"):
        main(["run", "./kv-cache-wrapper.sh", "-w", "cpu-only", "-t", "30"])
    shown = capsys.readouterr()
    assert shown.err == f"runs: python {command}\n" and not shown.out


@pytest.mark.parametrize(
    ("name", "near"),
    [("test_dsk", "test_disk"), ("kv-cash.py", "kv-cache.py"), ("nixl", "nixlbench"),
     ("benchmarks.remote_kv_cache.test_transfer", "test_transfer_out")],
)  # fmt: skip
def test_an_unknown_name_gets_the_similar_ones(name, near, capsys: pytest.CaptureFixture[str]):
    assert main(["run", name]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"there is no benchmark {name}; similar: ") and near in error
    assert error.count("\n") == 1 and "python -m benchmarks list" in error
