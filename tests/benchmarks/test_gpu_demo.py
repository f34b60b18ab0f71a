"""The demonstration on a GPU: which steps run where, their verdicts, and the page."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pages import Parsed

from benchmarks.engine import presets
from benchmarks.gpu_check.judging import FAILED, OK, SKIPPED, Verdict
from benchmarks.gpu_demo import __main__ as command
from benchmarks.gpu_demo import plan
from benchmarks.gpu_demo.plan import Step, Where, num_prompts, steps
from benchmarks.harness.record import Figure, Record, Row
from benchmarks.harness.registry import REPOSITORY
from benchmarks.harness.runner import Sample
from benchmarks.harness.steps import Ended
from benchmarks.remote_kv_cache import test_transfer_in as transfer_in
from benchmarks.remote_kv_cache import test_transfer_out as transfer_out
from remote_server.values import GiB

pytestmark = pytest.mark.real_time

BIG = Where(1, False, True, 2000 * GiB)
NAMES = ["demo", "exactness", "tensor parallelism", "transfer out", "transfer in"]


@pytest.fixture
def weights(tmp_path: Path) -> str:
    folder = tmp_path / "Qwen2.5-3B-Instruct"
    folder.mkdir()
    (folder / "a.safetensors").touch()
    return str(folder)


def by_name(where: Where) -> dict[str, Step]:
    made = steps(where)
    assert [step.name for step in made] == NAMES
    return {step.name: step for step in made}


def test_on_a_large_gpu_host_the_numbers_are_the_paper_s_but_for_prompts_beyond_its_server(
    weights: str,
):
    made = by_name(BIG._replace(model=weights))
    words = [*made["transfer in"].words[1:]]
    assert words == ["--preset", "paper", "--model", weights, "--num-prompts", "537"]
    assert [*made["transfer out"].words[1:]] == ["--preset", "paper", "--model", weights]
    assert made["tensor parallelism"].why_not == "needs two GPUs, this machine has 1"
    assert [step.why_not for step in made.values()].count("") == 4


def test_a_smaller_host_gets_what_fits_into_it(weights: str):
    words = by_name(BIG._replace(model=weights, available=100 * GiB))["transfer in"].words
    given = dict(zip(words[1::2], words[2::2], strict=True))
    server, pool = int(given["--memory-space"]), int(given["--cpu-pool"])
    assert server + pool + 2 * GiB < 85 * GiB
    numbers = transfer_in.PRESETS["paper"]
    prompts = int(given["--num-prompts"])
    stored = prompts * 6.5 * (numbers.trials + 1) * 961 * numbers.shape.bytes_per_token
    assert 0.8 * server < stored <= 0.9 * server, "as many as fit"
    assert num_prompts(10**15) == 1000 and num_prompts(1) == 1


@pytest.mark.parametrize(("gpus", "ranks"), [(2, "2"), (3, "2"), (8, "4")])
def test_tensor_parallelism_uses_as_many_gpus_as_the_model_has_heads(gpus: int, ranks: str):
    step = by_name(BIG._replace(num_gpus=gpus))["tensor parallelism"]
    assert [*step.words] == ["examples.demo", "--tensor-parallel", ranks]


def test_without_weights_only_the_paper_s_numbers_are_skipped(tmp_path: Path):
    made = by_name(BIG._replace(model=str(tmp_path)))
    assert "--model names their folder" in made["transfer in"].why_not
    assert len(made["transfer out"].words) == 1 and not made["transfer out"].why_not


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        (BIG._replace(num_gpus=0), "no GPU: CUDA's driver finds no device"),
        (BIG._replace(has_vllm=False), "vLLM is not installed in this Python"),
    ],
)
def test_what_is_missing_is_the_reason_of_every_step(where: Where, reason: str):
    assert {step.why_not for step in steps(where)} == {reason}


def test_on_a_cpu_the_same_steps_run_with_small_numbers():
    made = by_name(BIG._replace(num_gpus=0, on_cpu=True))
    assert made["tensor parallelism"].why_not == "needs two GPUs"
    assert "paper" not in [*made["transfer in"].words, *made["transfer out"].words]
    assert "--trials" in made["transfer in"].words


def test_every_command_is_understood_by_its_program(weights: str):
    for where in (BIG._replace(model=weights, available=90 * GiB, num_gpus=2),
                  BIG._replace(num_gpus=0, on_cpu=True)):  # fmt: skip
        for step in steps(where):
            if step.words and step.has_record:
                module = transfer_in if step.name == "transfer in" else transfer_out
                parser = presets.parser(module.MODULE, "?", module.PRESETS)
                numbers = presets.chosen(parser.parse_args(step.words[1:]), module.PRESETS)
                assert numbers.trials in (2, 3, 5)


class Programs:
    """Steps that end as the test wants."""

    def __init__(self) -> None:
        self.ended = Ended(0, 3.0, False)
        self.log = "out\n"
        self.record: Record | None = a_record(Row("m", "pass", 0, Sample([1.0])))
        self.interrupts = False

    def run(self, words: Sequence[str], log: Path, limit_s: float) -> Ended:
        log.write_text(self.log)
        if self.interrupts:
            raise KeyboardInterrupt
        if self.record is not None and "--json" in words:
            self.record.write(Path(words[words.index("--json") + 1]))
        return self.ended


def a_record(*rows: Row, **more: Any) -> Record:
    return Record(
        "a.bench", f"python -m a.bench --model {Path.home()}/w", rows=[*rows],
        figures=[Figure("speed", "GB/s", {"": 7.25})], **more,
    )  # fmt: skip


PLAIN = Step("demo", "Is it <there>?", ["examples.demo"])
BENCH = Step("transfer in", "What does it gain?", ["a.bench"], has_record=True)
LEFT_OUT = Step("exactness", "Are they equal?", why_not="needs two GPUs")


def demonstrate(tmp_path: Path, programs: Programs, *chosen: Step) -> command.Demonstration:
    made = command.Demonstration(
        chosen, BIG, command.begin(["--model", f"{Path.home()}/w"], BIG), tmp_path / "steps",
        tmp_path / "page.html", tmp_path / "all.json", programs.run, lambda _: None,
    )  # fmt: skip
    made.run_all()
    return made


def test_a_page_has_verdicts_records_outputs_and_no_folder_of_the_user(tmp_path: Path):
    programs = Programs()
    programs.log = f"a table\nlog: {Path.home()}/x and {REPOSITORY}/y\n"
    made = demonstrate(tmp_path, programs, PLAIN, LEFT_OUT, BENCH)
    assert [one.verdict for one in made.results] == [
        Verdict(OK), Verdict(SKIPPED, "needs two GPUs"), Verdict(OK)
    ]  # fmt: skip
    page = (tmp_path / "page.html").read_text()
    assert "Is it &lt;there&gt;?" in page and "7.25" in page and "needs two GPUs" in page
    assert "log: ~/x and ./y" in page and "--model ~/w" in page
    assert str(Path.home()) + "/" not in page and "src=" not in page.replace('src="data:', "")
    assert "Interrupted" not in page
    assert page.count("<table>") > 1 and Parsed(page).unscrolled == []


@pytest.mark.parametrize(
    ("step", "ended", "verdict"),
    [
        (PLAIN, Ended(1, 3.0, False), Verdict(FAILED, "exit status 1: the end")),
        (PLAIN, Ended(-9, 3.0, False), Verdict(FAILED, "ended by signal 9: the end")),
        (PLAIN, Ended(-15, 60.0, True), Verdict(FAILED, "did not end within 60 s")),
        (PLAIN, Ended(2, 3.0, False), Verdict(FAILED, "exit status 2: the end")),
        (BENCH, Ended(2, 3.0, False), Verdict(SKIPPED, "the end")),
        (BENCH, Ended(0, 3.0, False), Verdict(FAILED, "no record")),
    ],
)
def test_a_step_is_judged_by_how_it_ends(tmp_path: Path, step: Step, ended: Ended, verdict):
    programs = Programs()
    programs.ended, programs.log, programs.record = ended, "begin\nthe end\n", None
    made = demonstrate(tmp_path, programs, step)
    assert made.results[0].verdict == verdict
    if verdict.state == FAILED:
        assert "the end" in (tmp_path / "page.html").read_text()


def test_the_reason_of_a_failure_is_the_line_that_reports_what_is_wrong(tmp_path: Path):
    programs = Programs()
    programs.ended, programs.log = Ended(1, 3.0, False), "a\nWRONG  x\nWRONG  y\nLogs: z\n"
    made = demonstrate(tmp_path, programs, PLAIN)
    assert made.results[0].verdict.reason == "exit status 1: WRONG  x"


def test_rows_that_were_all_skipped_skip_the_step(tmp_path: Path):
    programs = Programs()
    programs.record = a_record(Row("m", "engine", 0, Sample(skipped="does not fit")))
    assert demonstrate(tmp_path, programs, BENCH).results[0].verdict == (SKIPPED, "does not fit")
    programs.record = a_record(Row("m", "engine", 0, Sample(failed="x")))
    assert demonstrate(tmp_path, programs, BENCH).results[0].verdict.state == FAILED


def test_the_record_of_an_earlier_run_is_not_taken_for_this_one(tmp_path: Path):
    programs = Programs()
    demonstrate(tmp_path, programs, BENCH)
    programs.record = None
    assert demonstrate(tmp_path, programs, BENCH).results[0].verdict.state == FAILED


def test_an_interruption_leaves_the_page_of_what_has_ended(tmp_path: Path):
    programs = Programs()
    made = command.Demonstration(
        [PLAIN, BENCH], BIG, command.begin([], BIG), tmp_path / "steps", tmp_path / "page.html",
        None, programs.run, lambda line: setattr(programs, "interrupts", "2/2" in line),
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        made.run_all()
    page = (tmp_path / "page.html").read_text()
    assert "Interrupted: 1 of 2 steps have ended." in page


def test_without_a_gpu_the_command_prints_the_reasons_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(plan, "look", lambda **_: BIG._replace(num_gpus=0))
    flags = ["--page", str(tmp_path / "page.html"), "--folder", str(tmp_path / "steps")]
    assert command.main(flags) == 0
    shown = capsys.readouterr().out
    assert shown.count("no GPU") == len(NAMES) and shown.count("SKIPPED") == len(NAMES)
    assert [*tmp_path.iterdir()] == []
    for names in ("nothing", "", "demo,,exactness"):
        with pytest.raises(SystemExit, match="2"):
            command.main([*flags, "--only", names])


def test_ctrl_c_ends_the_step_and_its_children_and_the_page_is_there(tmp_path: Path):
    """The whole command, with one step that waits for its end."""
    module = tmp_path / "waiting.py"
    module.write_text("import time\nprint('waits', flush=True)\ntime.sleep(60)\n")
    code = (
        "import sys\n"
        "from benchmarks.gpu_demo import __main__ as command, plan\n"
        "ends = plan.Step('demo', 'q', ['this'])\n"
        "waits = plan.Step('exactness', 'q', ['waiting'])\n"
        "plan.steps = lambda where: [ends, waits]\n"
        "sys.exit(command.main())"
    )
    page, folder = tmp_path / "page.html", tmp_path / "steps"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "--page", str(page), "--folder", str(folder)],
        cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{tmp_path}"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    log = folder / "exactness.log"
    deadline = time.monotonic() + 60
    while not (log.exists() and "waits" in log.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "1 of 2 steps have ended" in out and "Interrupted: 1 of 2" in page.read_text()


def test_the_verdicts_are_a_record_without_folders_of_the_user(tmp_path: Path):
    demonstrate(tmp_path, Programs(), BENCH, LEFT_OUT)
    found = Record.read(tmp_path / "all.json")
    assert [(row.operation, row.seconds, row.reason) for row in found.rows] == [
        ("transfer in", 3.0, ""), ("exactness", None, "SKIPPED: needs two GPUs")
    ]  # fmt: skip
    assert found.command == "python -m benchmarks.gpu_demo --model ~/w"
    assert str(Path.home()) + "/" not in (tmp_path / "all.json").read_text()
