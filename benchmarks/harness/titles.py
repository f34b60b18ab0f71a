"""Titles of pictures, made from a record's own facts.

A picture is often seen alone, so its title names what would make its figures those of something
else: a simulated engine, an emulated store, blocks of another size, a run that was interrupted.
`plot` takes a `Title`, and only this module makes one.
"""

import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from benchmarks.harness.record import Record

_SIMULATED = "simulated"


class Title(NamedTuple):
    """The text above a picture."""

    text: str


def of(record: Record, what: str) -> Title:
    """The title of a picture that shows `what`: with the record's labels, and its machine."""
    facts = labels_of(record.command, record.parameters, interrupted=record.interrupted)
    return _joined(what, [*facts], record.describe_machine())


def of_document(document: Mapping[str, Any], what: str) -> Title:
    """As `of`, for the JSON of a run of `storage_workload`, whose page names the machine."""
    parameters = {**document["parameters"]}
    if document.get("label"):
        parameters["label"] = document["label"]
    facts = labels_of(document["command"], parameters, interrupted=document["interrupted"])
    return _joined(what, [*facts], "")


def labels_of(command: str, parameters: Mapping[str, Any], *, interrupted: bool) -> Iterator[str]:
    """What is not the real thing in this record; nothing where all is.

    `command` and `parameters` are those of the record: a benchmark that emulates something names
    it in a parameter, or in the value of one.
    """
    words = shlex.split(command)
    for flag, value in _options(words):
        if flag == "--engine" and value.startswith(_SIMULATED):
            ratio = value.partition(":")[2]
            yield f"simulated engine{f', {ratio}:1' if ratio else ''}"
        if flag == "--bytes-scale" and float(value) != 1 and "label" not in parameters:
            yield f"SCALED: blocks of {float(value):g} times their size"
    if "--on-cpu" in words:
        yield "without a GPU"
    if label := parameters.get("label"):
        yield str(label)
    elif "--emulated-device" in words:
        yield "emulated storage"
    emulated = [name for name, value in parameters.items() if _is_emulated(name, value)]
    if emulated:
        named = [name for name in emulated if not name.startswith("emulated")]
        yield f"emulated: {', '.join(named)}" if named else ", ".join(emulated)
    if interrupted:
        yield "interrupted"


def _is_emulated(name: str, value: Any) -> bool:
    if name in ("label", "conclusion", "network"):
        return False
    return name.startswith("emulated") or (isinstance(value, str) and "an emulator" in value)


def _options(words: list[str]) -> Iterator[tuple[str, str]]:
    for word, following in zip(words, [*words[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        yield flag, value if equals else following


def _joined(what: str, labels: list[str], machine: str) -> Title:
    known = f" ({'; '.join(labels)})" if labels else ""
    return Title(f"{what}{known}{f': {machine}' if machine else ''}")
