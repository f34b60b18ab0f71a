"""A job: operations of one kind, in columns, and the results of each."""

import struct
from array import array
from collections.abc import Sequence
from ctypes import addressof, c_char
from enum import IntEnum
from operator import and_, eq

import numpy as np


class Kind(IntEnum):
    """Of all operations of a job. `KVF_COPY` and so on of mover.h."""

    COPY = 0
    """From address to address. They must not overlap. A target of 0 only hashes the source."""
    READ = 1
    """From an offset in a file to an address."""
    WRITE = 2
    """From an address to an offset in a file."""


class Priority(IntEnum):
    """The order in which jobs are taken; within one, in the order submitted."""

    READ = 0
    WRITE = 1
    VERIFY = 2


# struct kvf_job of mover.h.
_pack = struct.Struct("=4I8Q").pack
_HASH, _STREAM = 1, 2

_NO_FILES = array("i")
_COPY = Kind.COPY


class Job:
    """Operations on memory and files, as columns with one entry each.

    From `submit` until it is reaped, the memory and the files that it names belong to the mover:
    nothing may read, write, free or close them. After that the mover touches none of them. `keep`
    is an object that must live as long as the job. The results are meaningful when the job has
    been reaped, or `run` has returned; then it may be submitted again.
    """

    __slots__ = (
        "_columns", "_first_result", "count", "files", "header", "keep", "kind", "num_bytes",
        "number", "priority",
    )  # fmt: skip

    def __init__(
        self,
        kind: Kind,
        targets: Sequence[int],
        sources: Sequence[int],
        lengths: Sequence[int],
        *,
        seeds: Sequence[int] | None = None,
        files: Sequence[int] | None = None,
        stream: bool = False,
        priority: Priority = Priority.READ,
        keep: object = None,
    ) -> None:
        """Nine parameters: the fields of `struct kvf_job`, which is packed here alone, and `keep`.

        `targets` and `sources` are addresses, or offsets for the side that is a file; `files` are
        descriptors. With `seeds` each operation gets the XXH3-64 of its bytes. With `stream`
        copies bypass the caches. Raises `ValueError` for columns of different lengths and
        `OverflowError` for numbers that are negative or exceed 64 bits."""
        count = len(targets)
        if len(sources) != count or len(lengths) != count:
            raise ValueError(f"columns: {count}, {len(sources)} and {len(lengths)} entries")
        self.kind = kind
        self.count = count
        self.priority = priority
        self.keep = keep
        self.number = 0
        """The mover's name for it while it is submitted, else 0."""
        self.num_bytes: int = sum(lengths)
        # One array of all columns and results: its address is that of each, with an offset.
        column = 8 * count
        flags = _STREAM if stream else 0
        results = (0,) * (2 * count + (count + 1) // 2)  # errors take half a word
        if seeds is None:
            columns = array("Q", [*targets, *sources, *lengths, *results])
            self._first_result = 3 * count
        else:
            if len(seeds) != count:
                raise ValueError(f"columns: {count} entries, {len(seeds)} seeds")
            flags += _HASH
            columns = array("Q", [*targets, *sources, *lengths, *seeds, *results])
            self._first_result = 4 * count
        self._columns = columns
        if kind == _COPY:
            self.files, files_at = _NO_FILES, 0
        elif files is None or len(files) != count:
            raise ValueError(f"columns: {count} entries, files: {files!r:.80}")
        else:
            self.files = array("i", files)
            files_at = self.files.buffer_info()[0]
        at = columns.buffer_info()[0]
        done_at = at + 8 * self._first_result
        self.header = _pack(
            kind, flags, count, priority,
            files_at, at, at + column, at + 2 * column, at + 3 * column,
            done_at, done_at + column, done_at + 2 * column,
        )  # fmt: skip
        """`struct kvf_job`, with addresses in this object's arrays."""

    @property
    def targets(self) -> "array[int]":
        return self._columns[: self.count]

    @property
    def sources(self) -> "array[int]":
        return self._columns[self.count : 2 * self.count]

    @property
    def lengths(self) -> "array[int]":
        return self._columns[2 * self.count : 3 * self.count]

    @property
    def seeds(self) -> "array[int]":
        """Empty in a job without seeds."""
        return self._columns[3 * self.count : self._first_result]

    @property
    def done(self) -> "array[int]":
        """Of each operation, the bytes moved."""
        return self._columns[self._first_result : self._first_result + self.count]

    @property
    def digests(self) -> "array[int]":
        """Of each operation without an error, the XXH3-64 of its bytes, if the job has seeds."""
        first = self._first_result + self.count
        return self._columns[first : first + self.count]

    @property
    def errors(self) -> "array[int]":
        """Of each operation, 0 or an errno: ECANCELED, EFAULT for memory whose file was truncated,
        ENODATA at the end of a file, and those of read and write."""
        return array("i", self._columns[self._first_result + 2 * self.count :].tobytes())[
            : self.count
        ]

    @property
    def failed(self) -> bool:
        """Whether any operation has an error."""
        return any(self._columns[self._first_result + 2 * self.count :])

    def set_result(self, index: int, done: int, digest: int, error: int) -> None:
        """The results of one operation, of a mover that is not native."""
        first = self._first_result
        self._columns[first + index] = done
        self._columns[first + self.count + index] = digest
        with memoryview(self._columns) as words, words.cast("B") as octets:
            octets[8 * (first + 2 * self.count) :].cast("i")[index] = error

    def intact(self, announced: Sequence[int]) -> list[bool]:
        """Of each operation, whether it has no error and has the digest that is `announced`. An
        empty `announced` has none to compare."""
        moved = [not error for error in self.errors] if self.failed else [True] * self.count
        if not announced:
            return moved
        same = map(eq, self.digests, announced)
        return [*map(and_, moved, same)]


def address_of(view: memoryview) -> int:
    """Where the bytes of `view` begin."""
    if not view.readonly and view.nbytes:
        return addressof(c_char.from_buffer(view))  # a tenth of the time
    flat = np.frombuffer(memoryview(view).cast("B"), np.uint8)
    return int(flat.__array_interface__["data"][0])


def memory_at(address: int, length: int) -> memoryview:
    """The memory there, writable. It must outlive the view."""
    return memoryview((c_char * length).from_address(address)).cast("B")
