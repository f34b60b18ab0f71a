"""What `make matrix` found, as it is committed, and docs/compatibility.md."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from model_kinds import ALONE, KINDS, PROMPT_TOKENS
from refusals import CASES, Refused

RECORDS = Path(__file__).resolve().parent
PAGE = RECORDS.parents[2] / "docs" / "compatibility.md"

LEVELS = ("engine", "pool", "server", "disk", "bucket")
WAYS = ("TP 2", "PP 2", "DP 2")

WORKS, TIED, AS_VLLM, WRONG = "equal", "tied", "as vLLM's own hit", "WRONG"


class Found(NamedTuple):
    """One level of one kind."""

    level: str
    verdict: str
    tokens: int
    """Of the prompt, that came from this level."""

    refused: str = ""
    """Why no engine ran this way."""


class Result(NamedTuple):
    """One kind: what was found at each level, or why no engine ran."""

    kind: str
    levels: Sequence[Found]
    refused: str
    seconds: float


def is_bad(result: Result) -> bool:
    """Whether an answer is wrong, or comes from elsewhere than it should, or no engine ran where
    vLLM can run one."""
    kind = KINDS[result.kind]
    if result.refused:
        return ALONE not in kind.vllm_cannot
    return any(
        each.level not in kind.vllm_cannot
        if each.refused
        else each.verdict.startswith(WRONG) or bool(each.tokens) == (each.level in kind.absent)
        for each in result.levels
    )


def lines_of(result: Result) -> list[str]:
    lines = [
        f"  {each.level:8} {each.refused or f'{each.tokens:6} tokens  {each.verdict}'}"
        for each in result.levels
    ]
    if result.refused:
        lines.append(f"  refused: {result.refused}")
    return [*lines, f"  {result.seconds:g} s"]


def keep(version: str, results: Sequence[Result], refused: Sequence[Refused] = ()) -> None:
    """Put these into the record of their release line, in place of older ones of the same names,
    and write the page of all lines. Nothing of another version of the line is kept."""
    RECORDS.mkdir(exist_ok=True)
    file = RECORDS / f"{'.'.join(version.split('.')[:2])}.json"
    former: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if former.get("vllm") != version:
        former = {}
    kinds = {kind["kind"]: kind for kind in former.get("kinds", [])}
    for result in results:
        levels = [level._asdict() for level in result.levels]
        kinds[result.kind] = result._asdict() | {"levels": levels}
    cases = {case["case"]: case for case in former.get("refused", [])}
    cases |= {case.case: case._asdict() for case in refused}
    record = {
        "vllm": version,
        "kinds": [kinds[name] for name in KINDS if name in kinds],
        "refused": [cases[name] for name in CASES if name in cases],
    }
    file.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(page())


ABOUT = f"""
Made by `make matrix`, from a record of each supported release line. Each kind is a small model with
random weights, on a real engine on a CPU. A prompt of {PROMPT_TOKENS:,} tokens is computed. Then it
is found in the engine's own cache, in the CPU pool, in a server's memory, on its disk after a
restart, and in a bucket from which a new server reads. A cell has the tokens that came from there.
A bucket holds whole packs, so the rest of a prompt is computed.

The answer equals the computed one, or the cell has what it was instead:

- *{TIED}*: at the first token that differs, the two best candidates are within 0.1 of each other.
- *{AS_VLLM}*: it differs from the computed one as the answer from vLLM's own prefix cache does.
"""

WORKERS = """
The tokens that came from the server's memory. On a CPU vLLM turns asynchronous scheduling off;
`tests/kv_connector/test_steps_ahead.py` drives vLLM's own scheduler and connector in that order.
"""

REFUSED = """
Each was tried. vLLM shows a connector its configuration when the weights are loaded. Only the
settings come earlier, where CUDA graphs are captured, which is vLLM's default on a GPU.
"""


def page() -> str:
    """docs/compatibility.md."""
    files = sorted(RECORDS.glob("*.json"), key=lambda file: [*map(int, file.stem.split("."))])
    records = [json.loads(file.read_text()) for file in files]
    lines = ["# Kinds of models", "", *ABOUT.strip().splitlines(), ""]
    lines += _table(records, LEVELS, [*KINDS])
    lines += ["", "## Two workers", "", *WORKERS.strip().splitlines(), ""]
    lines += _table(records, WAYS, [name for name, kind in KINDS.items() if kind.is_model])
    lines += ["", "## Refused at start", "", *REFUSED.strip().splitlines(), ""]
    lines += _refusals(records)
    return "\n".join(lines) + "\n"


def _refusals(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "| case | vLLM | the sentence in the log | when |"
    yield "|---|---|---|---|"
    for name in CASES:
        for record in records:
            for case in record["refused"]:
                if case["case"] == name:
                    when = "after" if case["loaded"] else "before"
                    yield (
                        f"| {name} | {record['vllm']} | {case['sentence']} | {when} the weights |"
                    )


def _table(
    records: Sequence[Mapping[str, Any]], columns: Sequence[str], names: Sequence[str]
) -> Iterator[str]:
    yield f"| kind | vLLM | {' | '.join(columns)} |"
    yield "|" + "---|" * (len(columns) + 2)
    for name in names:
        for record in records:
            for kind in record["kinds"]:
                if kind["kind"] == name:
                    cells = " | ".join(_cells(kind, columns))
                    yield f"| **{name}**: {KINDS[name].about} | {record['vllm']} | {cells} |"


def _cells(kind: Mapping[str, Any], columns: Sequence[str]) -> Iterator[str]:
    by_level = {level["level"]: level for level in kind["levels"]}
    for column in columns:
        if column in by_level:
            yield _cell(kind["kind"], **by_level[column])
        elif column == columns[0]:
            yield f"does not run: {kind['refused']}"
        else:
            yield ""


def _cell(kind: str, level: str, verdict: str, tokens: int, refused: str) -> str:
    if refused:
        return f"does not run: {refused}"
    if level in KINDS[kind].absent and not tokens:
        return f"computed: {KINDS[kind].absent[level]}"
    return f"{tokens:,}" + ("" if verdict == WORKS else f" ({verdict})")
