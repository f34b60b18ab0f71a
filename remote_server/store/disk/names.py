"""What the files of a disk tier are called."""

import re
from collections.abc import Container
from itertools import count
from typing import NamedTuple

README = "README.txt"
README_NEW = "README.txt.new"
LOCK = "LOCK"
OURS = (README, README_NEW, LOCK, "lost+found")  # the last is the file system's, at its root

_SEGMENT = re.compile(r"segment-(\d{8,})(\.new)?")
_ASIDE = re.compile(r"segment-\d{8,}(\.new)?\.damaged(\.\d+)?")


class SegmentName(NamedTuple):
    number: int
    is_unfinished: bool


def segment_name(number: int) -> str:
    return f"segment-{number:08d}"


def new_name(number: int) -> str:
    """What a segment is called until it is complete."""
    return segment_name(number) + ".new"


def parse(name: str) -> SegmentName | None:
    """None unless it is a segment's name, complete or not."""
    match = _SEGMENT.fullmatch(name)
    return None if match is None else SegmentName(int(match[1]), bool(match[2]))


def aside_name(name: str, taken: Container[str]) -> str:
    """What `name` is called when it is put aside, because it cannot be read as a segment."""
    wanted = f"{name}.damaged"
    return next(
        free
        for number in count(1)
        if (free := wanted if number == 1 else f"{wanted}.{number}") not in taken
    )


def is_aside(name: str) -> bool:
    return _ASIDE.fullmatch(name) is not None


def is_of_a_segment(name: str) -> bool:
    """A segment's, or that of something that once had such a name."""
    return parse(name) is not None or is_aside(name)
