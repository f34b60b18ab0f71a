"""Options of a run, and the messages for wrong ones."""

import fnmatch
from pathlib import Path
from typing import Any

import pytest

from benchmarks.storage_workload import __main__ as storage_workload
from benchmarks.storage_workload.plan import flags
from benchmarks.storage_workload.plan.options import DEFAULTS, Options, default_output
from benchmarks.storage_workload.plan.scenarios import SCENARIOS
from benchmarks.storage_workload.traffic.models import MODELS
from remote_server.errors import ConfigError


def test_help_lists_every_option_and_its_default():
    parser = flags.parser()
    text = " ".join(parser.format_help().split())
    helps = {action.dest: str(action.help) for action in parser._actions}
    for name, default in DEFAULTS.items():
        flag = "--no-samples" if name == "samples" else "--" + name.replace("_", "-")
        assert f" {flag} " in text and len(helps[name]) > 5, flag
        if default is not None and not isinstance(default, bool):
            shown = f"{default:g}" if isinstance(default, (int, float)) else str(default)
            assert helps[name].endswith(f"(default: {shown})"), flag
    for word in (*SCENARIOS, *MODELS):
        assert word in text


def different(name: str, folder: Path) -> Any:
    """A value that is allowed and is not the default."""
    words: dict[str, Any] = {
        "model": "tiny-1b", "generation_mode": "fast", "autoscaler_mode": "capacity",
        "performance_profile": "throughput", "arrival": "poisson", "seed": 7,
        "target_saturation": 1 / 3, "bytes_scale": 0.1 + 0.2, "duration": 1234567.875,
        "server": "tcp://127.0.0.1:5757", "use_burst_trace": False, "samples": False,
    }  # fmt: skip
    if name in words:
        return words[name]
    if name in ("cache_dir", "plots"):
        return folder
    default = DEFAULTS[name]
    if default is None or isinstance(default, Path):
        return folder / name
    return True if default is False else default + 1.5 if isinstance(default, float) else 3


NEEDS: dict[str, dict[str, Any]] = {
    "request_rate": {"arrival": "poisson"},
    "trace_rate": {"arrival": "trace", "mooncake_trace": Path("t.jsonl")},
    "burst_trace_path": {"use_burst_trace": True},
    "max_conversations": {"dataset_path": Path("talk.json")},
    "rag_num_docs": {"enable_rag": True},
    "autoscaler_mode": {"enable_autoscaling": True},
    "target_saturation": {"enable_autoscaling": True},
    "scale_interval": {"enable_autoscaling": True},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_printed_flags_are_those_of_the_same_run(name, tmp_path):
    options = Options(**{name: different(name, tmp_path), **NEEDS.get(name, {})})
    assert flags.parse(options.arguments()) == options


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_flags_that_a_scenario_prints_are_that_scenario(name):
    options = flags.parse(["--scenario", name])
    words = options.arguments()
    assert "--scenario" not in words
    assert flags.parse(words) == options == Options(**SCENARIOS[name])
    assert options.seed == 42


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--model llama3.1-8", "model: 'llama3.1-8' is none of *did you mean llama3.1-8b?"),
        ("--modle x", "there is no option --modle; did you mean --model?"),
        ("--num-users x", "argument --num-users: invalid int value: 'x'"),
        ("--cpu-mem-gb nan", "cpu_mem_gb: nan is not a finite number"),
        ("--duration inf", "duration: inf must be greater than 0, and finite"),
        ("--arrival trace", "arrival: trace needs a trace to take the times from"),
        ("--enable-autoscaling --target-saturation 1.5",
         "target_saturation: 1.5 must be above 0 and at most 1"),
        ("--enable-autoscaling --arrival poisson",
         "arrival: poisson with enable_autoscaling: only users can be added"),
        ("--enable-autoscaling --use-burst-trace",
         "use_burst_trace with enable_autoscaling: a trace has its own load"),
        ("--use-burst-trace --dataset-path x", "use_burst_trace and dataset_path: one trace at a "
         "time"),
        ("--no-disk --cpu-mem-gb 0 --gpu-mem-gb 0",
         "cpu_mem_gb: 0 with no_disk leaves nowhere to store anything"),
        ("--server tcp://127.0.0.1:1 --cache-dir /tmp",
         "cache_dir with server: the server has a directory of its own"),
        ("--cascade --no-disk", "cascade: needs memory above a disk"),
        ("--server tcp://127.0.0.1:1 --cascade", "cascade: True changes nothing without *"),
        ("--request-rate 20", "request_rate: 20 changes nothing without an arrival of *"),
        ("--trace-rate 2", "trace_rate: 2 changes nothing without an arrival of trace"),
        ("--use-burst-trace --enable-rag", "enable_rag with use_burst_trace: a trace brings *"),
        ("--use-burst-trace --think-scale 0", "think_scale: 0 changes nothing without users *"),
        ("--block-tokens 100000000", "block_tokens: 100000000 of 128.0 KiB are blocks of *"),
        ("quik", "there is no option quik; did you mean --scenario quick?"),
        ("--mooncake-trace /nowhere", "mooncake_trace: /nowhere: No such file or directory"),
        ("--cache-dir /nowhere", "cache_dir: there is no folder /nowhere"),
        ("--output /nowhere/x.json", "output: there is no folder /nowhere"),
        ("--html /tmp", "html: /tmp is a folder"),
        ("report /nowhere.json", "/nowhere.json: [[]Errno 2] *"),
        ("suite -w cpu", "-w: 'cpu' is none of *"),
        ("suite --folder /dev/null/x", "--folder: /dev/null/x: Not a directory"),
    ],
)  # fmt: skip
def test_an_impossible_wish_ends_with_2_and_one_line_that_names_it(words, said, capsys):
    assert storage_workload.main(words.split()) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert fnmatch.fnmatchcase(error.strip(), said), error


def test_a_folder_that_may_not_be_written_to_is_found_before_anything_is_measured(
    tmp_path, monkeypatch
):
    def refuse(dir: Path) -> None:
        assert dir == tmp_path
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    for name in ("cache_dir", "plots"):
        with pytest.raises(ConfigError, match="may not be written to"):
            Options(**{name: tmp_path})
    with pytest.raises(ConfigError, match="may not be written to: Permission denied"):
        Options(output=tmp_path / "x.json")
    assert [*tmp_path.iterdir()] == []


def test_two_runs_that_end_in_the_same_second_keep_their_results_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "same")
    assert [str(default_output()) for _ in range(3)] == ["same.json", "same_2.json", "same_3.json"]


def test_a_run_begins_nowhere_that_its_results_could_not_be_written_to(capsys, monkeypatch):
    monkeypatch.chdir("/proc")
    assert storage_workload.main(["--model", "tiny-1b", "--duration", "1"]) == 2
    assert capsys.readouterr().err.startswith("output: . may not be written to")
