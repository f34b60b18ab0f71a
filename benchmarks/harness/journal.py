"""The measurements of a run that has not ended: one line each beside its record, for `--resume`.

    journal = Journal.open(record, arguments.json, resume=arguments.resume)
    if (value := journal.get("round 1", "4x1")) is None:
        value = measure()
        journal.put(("round 1", "4x1"), value)
    …
    journal.end(complete=not runner.interrupted)

Values are JSON. A journal is kept after Ctrl-C or a crash, and removed when the run is complete.
Only a run of the same command and the same source takes what is in it.
"""

import json
import sys
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

SUFFIX = ".part"


class Run(Protocol):
    """What identifies the run whose measurements these are; a record has both."""

    @property
    def command(self) -> str: ...

    @property
    def source(self) -> Mapping[str, Any]: ...


class Journal:
    """Values by their keys, tuples of words. Without a file it only holds what is put."""

    def __init__(self, path: Path | None = None, identity: object = None) -> None:
        self.num_kept = 0
        """Values of an earlier run."""
        self._path = path
        self._identity = json.loads(json.dumps(identity))
        self._values: dict[str, Any] = {}
        self._file: TextIO | None = None

    @classmethod
    def open(cls, run: Run, json_file: Path | None, *, resume: bool) -> "Journal":
        """The journal beside `json_file`; none without one. With `resume` it begins with what an
        earlier run of this command and source has measured."""
        if json_file is None:
            return cls()
        path = json_file.with_name(json_file.name + SUFFIX)
        journal = cls(path, {"command": run.command, "source": run.source})
        if resume and run.source.get("clean"):
            journal._read()
        elif resume:
            print(f"{path}: files of the source are changed, or it is in no git: measured anew",
                  file=sys.stderr)  # fmt: skip
        journal._file = path.open("w")
        journal._line(journal._identity)
        for key, value in journal._values.items():
            journal._line([key, value])
        return journal

    def get(self, *key: Hashable) -> Any | None:
        return self._values.get(_text(key))

    def put(self, key: tuple[Hashable, ...], value: Any) -> None:
        """`value` is not None. It is written at once: a crash loses nothing."""
        self._values[_text(key)] = value
        self._line([_text(key), value])

    def end(self, *, complete: bool) -> None:
        """Close the file, and remove it when nothing is left to be measured."""
        if self._file is not None and self._path is not None:
            self._file.close()
            self._file = None
            if complete:
                self._path.unlink(missing_ok=True)

    def _read(self) -> None:
        assert self._path is not None
        try:
            first, *lines = self._path.read_text().splitlines()
        except (OSError, ValueError):
            print(f"{self._path}: nothing to resume, measured anew", file=sys.stderr)
            return
        if _parsed(first) != self._identity:
            print(f"{self._path}: of another command or source, measured anew", file=sys.stderr)
            return
        for line in lines:
            match _parsed(line):  # the last one may be cut
                case [str(key), value]:
                    self._values[key] = value
        self.num_kept = len(self._values)
        print(f"{self._path}: {self.num_kept} measurements are kept", file=sys.stderr)

    def _line(self, value: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps(value) + "\n")
            self._file.flush()


def _text(key: tuple[Hashable, ...]) -> str:
    return json.dumps([str(word) for word in key])


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
