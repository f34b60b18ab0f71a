"""The demonstration on a GPU: which steps run where, their verdicts, and the page."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_programs import Programs
from pages import Parsed

from benchmarks.engine import presets
from benchmarks.gpu_check.judging import FAILED, OK, SKIPPED, Verdict
from benchmarks.gpu_demo import __main__ as command
from benchmarks.gpu_demo import plan
from benchmarks.gpu_demo.plan import Step, Where, num_prompts, steps
from benchmarks.harness.commands.registry import REPOSITORY
from benchmarks.harness.commands.steps import Ended
from benchmarks.harness.record import Figure, Record, Row
from benchmarks.harness.runner import Sample
from benchmarks.remote_kv_cache import test_transfer_in as transfer_in
from benchmarks.remote_kv_cache import test_transfer_out as transfer_out
from remote_server.values import GiB

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


def test_every_command_is_understood_by_its_program(weights: str):
    for where in (BIG._replace(model=weights, available=90 * GiB, num_gpus=2),
                  BIG._replace(num_gpus=0, on_cpu=True)):  # fmt: skip
        for step in steps(where):
            if step.words and step.has_record:
                module = transfer_in if step.name == "transfer in" else transfer_out
                parser = presets.parser(module.MODULE, "?", module.PRESETS)
                numbers = presets.chosen(parser.parse_args(step.words[1:]), module.PRESETS)
                assert numbers.trials in (2, 3, 5)


def a_record(*rows: Row, **more: Any) -> Record:
    return Record(
        "a.bench", f"python -m a.bench --model {Path.home()}/w", rows=[*rows],
        figures=[Figure("speed", "GB/s", {"": 7.25})], **more,
    )  # fmt: skip


PLAIN = Step("demo", "Is it <there>?", ["examples.demo"])
BENCH = Step("transfer in", "What does it gain?", ["a.bench"], has_record=True)
LEFT_OUT = Step("exactness", "Are they equal?", why_not="needs two GPUs")


@pytest.fixture
def programs() -> Programs:
    return Programs(a_record(Row("m", "pass", 0, Sample([1.0]))))


def demonstrate(tmp_path: Path, programs: Programs, *chosen: Step) -> command.Demonstration:
    made = command.Demonstration(
        chosen, BIG, command.begin(["--model", f"{Path.home()}/w"], BIG), tmp_path / "steps",
        tmp_path / "page.html", tmp_path / "all.json", programs.run, lambda _: None,
    )  # fmt: skip
    made.run_all()
    return made


def test_page_and_record_have_verdicts_and_outputs_and_no_folder_of_the_user(
    tmp_path: Path, programs: Programs
):
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
    found = Record.read(tmp_path / "all.json")
    assert [(row.operation, row.seconds, row.reason) for row in found.rows] == [
        ("demo", 10.0, ""), ("exactness", None, "SKIPPED: needs two GPUs"),
        ("transfer in", 10.0, ""),
    ]  # fmt: skip
    assert found.command == "python -m benchmarks.gpu_demo --model ~/w"
    assert str(Path.home()) + "/" not in (tmp_path / "all.json").read_text()


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
def test_a_step_is_judged_by_how_it_ends(
    tmp_path: Path, programs: Programs, step: Step, ended: Ended, verdict: Verdict
):
    programs.ended, programs.log, programs.record = ended, "begin\nthe end\n", None
    made = demonstrate(tmp_path, programs, step)
    assert made.results[0].verdict == verdict
    if verdict.state == FAILED:
        assert "the end" in (tmp_path / "page.html").read_text()


def test_an_interruption_leaves_the_page_of_what_has_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, programs: Programs,
    capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    page = tmp_path / "page.html"

    def show(line: str) -> None:
        programs.error = KeyboardInterrupt() if "2/2" in line else None

    demonstration = partial(command.Demonstration, run=programs.run, show=show)
    monkeypatch.setattr(command, "Demonstration", demonstration)
    monkeypatch.setattr(plan, "look", lambda **_: BIG)
    monkeypatch.setattr(plan, "steps", lambda _: [PLAIN, BENCH])
    assert command.main(["--page", str(page), "--folder", str(tmp_path / "steps")]) == 130
    assert "1 of 2 steps have ended" in capsys.readouterr().out
    assert "Interrupted: 1 of 2 steps have ended." in page.read_text()


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
