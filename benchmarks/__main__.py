"""The benchmarks' command: list them, run one, compare two records, write a page of all results.

python -m benchmarks list
python -m benchmarks run test_disk --json disk.json
python -m benchmarks compare A.json B.json
python -m benchmarks report results.html
python -m benchmarks results
python -m benchmarks records
"""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import pictures
from benchmarks.harness.commands import registry, remaking, scripts
from benchmarks.harness.compare import compare_records
from benchmarks.harness.pages import page, readmes
from benchmarks.harness.printing import tolerate_closed_pipe
from benchmarks.harness.record import Record, RecordError

RESULTS = Path(__file__).resolve().parent / "results"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 when the command was carried out; 1 where `compare` found something slower or
    FAILED in the second record, or `results --check` something stale; 2 otherwise. `run` does not
    return: the benchmark replaces this process and receives its signals."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["run"] and given[1:2] and not given[1].startswith("-"):
        return _run(given[1], given[2:])  # the benchmark parses its own flags, also `--help`
    arguments = _parser().parse_args(given)
    status = 0
    with tolerate_closed_pipe():
        status = int(arguments.do(arguments))
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=(__doc__ or "").partition("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    listed = commands.add_parser("list", help="each benchmark, and the question it answers")
    listed.set_defaults(do=_list)
    run = commands.add_parser("run", help="run one by its name, with the arguments that follow")
    run.add_argument("name", metavar="NAME")
    run.epilog = (
        "NAME is one of `list`, a module, or a script of a source document: "
        f"{', '.join(scripts.scripts())}. Arguments behind it are the benchmark's own."
    )
    run.set_defaults(do=lambda arguments: _run(arguments.name, []))
    compare = commands.add_parser(
        "compare",
        help="the verdict on two records, row by row; exit status 1 where the second is slower or "
        "FAILED",
    )
    compare.add_argument("before", type=Path, metavar="A.json")
    compare.add_argument("after", type=Path, metavar="B.json")
    compare.add_argument(
        "--ratios",
        action="store_true",
        help="compare each run's ratios to its own memcpy instead of its seconds: less exact, "
        "but right when the machine was slower during one of the runs",
    )
    compare.set_defaults(do=_compare)
    report = commands.add_parser("report", help="write the latest record of each as one page")
    report.add_argument("page", type=Path, metavar="PAGE.html")
    report.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    report.set_defaults(do=_report)
    results = commands.add_parser(
        "results", help="write the latest results into the READMEs, and draw their pictures"
    )
    results.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 where one is stale"
    )
    results.set_defaults(do=_results)
    records = commands.add_parser(
        "records", help="make the committed records again, those of another commit"
    )
    records.add_argument(
        "names", nargs="*", metavar="NAME", help="only these, as in: 'test_server*' (default: all)"
    )
    records.add_argument(
        "--trials",
        type=int,
        metavar="N",
        help="in place of the --trials that a command names: a verdict on a goal takes 6",
    )
    records.set_defaults(do=_records)
    return parser


def _records(arguments: argparse.Namespace) -> int:
    """0; 1 where one was not made; 2 for names that match none; 130 after Ctrl-C."""

    def show(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    work = remaking.in_folder(RESULTS, show, arguments.trials)
    if not work.chosen(arguments.names):
        print(f"no record is named {' or '.join(arguments.names)}", file=sys.stderr)
        return 2
    status = 0
    try:
        for outcome in work.all(arguments.names):
            print(f"{outcome.name}: {outcome.what}", flush=True)
            status = max(status, int(not (outcome.made or outcome.kept)))
    except KeyboardInterrupt:
        print("interrupted: the same command goes on with the next record", file=sys.stderr)
        return 130
    print("next: make docs")
    return status


def _list(_: argparse.Namespace) -> int:
    found = registry.find()
    width = max(map(len, found))
    for name, benchmark in found.items():
        print(f"{name:<{width}}  {benchmark.question}")
    return 0


def _run(name: str, arguments: Sequence[str]) -> int:
    try:
        words = ["-m", *scripts.command_of(name), *arguments]
    except LookupError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"runs: python {shlex.join(words)}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *words])


def _compare(arguments: argparse.Namespace) -> int:
    try:
        before, after = Record.read(arguments.before), Record.read(arguments.after)
    except RecordError as error:
        print(error, file=sys.stderr)
        return 2
    comparison = compare_records(before, after, ratios=arguments.ratios)
    print(comparison.text)
    if not comparison.comparable:
        return 2
    return 1 if comparison.slower or comparison.failed else 0


def _report(arguments: argparse.Namespace) -> int:
    shown, others = page.latest(arguments.results)
    if not shown:
        print(f"{arguments.results} has no record", file=sys.stderr)
        return 2
    recorded = {one.record.benchmark for one in shown}
    questions = {module: registry.question_of(module) for module in recorded}
    questions |= {one.module: one.question for one in registry.find().values()}
    try:
        wanted = readmes.goal_lines() if arguments.results == RESULTS else {}
    except readmes.ReadmeError as error:
        print(error, file=sys.stderr)
        return 2
    text = page.page(shown, others, questions, registry.documents(), wanted)
    try:
        arguments.page.write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"not written: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.page}: {len(shown)} records")
    for line in others:
        print(f"left out: {line}", file=sys.stderr)
    return 0


def _results(arguments: argparse.Namespace) -> int:
    """0; 1 for a stale README or a record without one; 2 where one cannot be made."""
    status = 0
    for readme in readmes.found():
        try:
            text = readmes.rewritten(readme)
        except readmes.ReadmeError as error:
            print(error, file=sys.stderr)
            status = 2
            continue
        if text == readme.read_text():
            continue
        if arguments.check:
            print(f"stale, run `python -m benchmarks results`: {readme}", file=sys.stderr)
            status = status or 1
        else:
            readme.write_text(text)
            print(f"written: {readme}")
    try:
        of_pictures = _pictures(write=not arguments.check)  # also beside a README that is stale
        status = status or of_pictures
        for complaint in readmes.complaints():
            print(complaint, file=sys.stderr)
            status = status or 1
    except (LookupError, readmes.ReadmeError, RecordError) as error:
        print(error, file=sys.stderr)
        status = 2
    return status


def _pictures(*, write: bool) -> int:
    """Draw the stale pictures, or all that their charts' code draws differently. 0; 1 for a stale
    one that was not written; 2 for one that its record cannot give."""
    status = 0
    for picture in pictures.found(RESULTS):
        if not write:
            if not picture.is_of_its_record():
                print(f"stale, run `make docs`: {picture.file}", file=sys.stderr)
                status = status or 1
            continue
        try:
            text = pictures.drawn(picture)
        except LookupError as error:
            print(error, file=sys.stderr)
            status = 2
            continue
        if text != picture.file.read_text():
            picture.file.write_text(text)
            print(f"drawn: {picture.file}")
    return status


if __name__ == "__main__":
    sys.exit(main())
