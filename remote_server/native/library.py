"""The native library: found beside this file, loaded once, its functions with their types.

`CDLL` releases the GIL around a call and `PyDLL` does not. Releasing costs more than a short call,
because another thread may take the GIL and keep it: submit, cancel, reap and small jobs hold it.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ABI = 4
"""`KVF_ABI` of mover.h."""

PATH = Path(__file__).with_name("libkvferry.so")

_POINTER, _CHARS = ctypes.c_void_p, ctypes.c_char_p
_U32, _U64, _I64 = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int64


class LibraryMissing(Exception):
    """There is no library that can be used; the message has the reason."""


@dataclass(frozen=True, slots=True)
class Library:
    """The functions of mover.h, lanes.h and tls.h, without `kvf_`. A job is passed as its struct,
    in bytes."""

    instructions: str
    """The instruction set that it chose: "avx512", "avx2" or "plain"."""

    run: Callable[[bytes], int]
    run_holding_the_gil: Callable[[bytes], int]
    pool_new: Callable[[int, int], int | None]
    pool_descriptor: Callable[[int], int]
    submit: Callable[[int, bytes], int]
    cancel: Callable[[int, int], int]
    reap: Callable[[int, int, int], int]
    pool_free: Callable[[int], None]

    lanes_new: Callable[[int], int | None]
    lanes_descriptor: Callable[[int], int]
    lanes_open: Callable[[int, int, int | None], int]
    lanes_submit: Callable[[int, int, bytes], int]
    lanes_abandon: Callable[[int, int], None]
    lanes_close_lane: Callable[[int, int], None]
    lanes_reap: Callable[[int, int, int, int], int]
    lanes_free: Callable[[int], None]

    tls_why_none: Callable[[], bytes | None]
    tls_context_new: Callable[[bytes | None, int, bytes | None, int], int | None]
    tls_context_free: Callable[[int], None]
    tls_new: Callable[[int, int, bytes | None], int | None]
    tls_handshake: Callable[[int], int]
    tls_read: Callable[[int, int, int], int]
    tls_write: Callable[[int, bytes, int], int]
    tls_free: Callable[[int], None]


@cache
def load() -> Library:
    """The library. Raises `LibraryMissing`."""
    return load_from(PATH)


def load_from(path: Path) -> Library:
    """The library at `path`. Raises `LibraryMissing`."""
    if not path.exists():
        raise LibraryMissing(f"there is no {path.name}; python -m remote_server.native.build")
    try:
        without_gil, with_gil = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        if (abi := with_gil.kvf_abi()) != ABI:
            raise LibraryMissing(f"{path.name} has ABI {abi}, this code {ABI}: build it again")
        return _functions(without_gil, with_gil)
    except (OSError, AttributeError) as error:
        # Clients see the reason: it names no folder of this host.
        why = str(error).replace(str(path), path.name)
        raise LibraryMissing(f"{path.name} cannot be loaded: {why}") from error


def _functions(without_gil: ctypes.CDLL, with_gil: ctypes.PyDLL) -> Library:
    """Raises `AttributeError` for a missing one."""
    instructions = _function(with_gil.kvf_instructions, _CHARS)()
    return Library(
        instructions=instructions.decode(),
        # A job of `bytes`: ctypes passes the address of its contents.
        run=_function(without_gil.kvf_run, _U32, _CHARS),
        run_holding_the_gil=_function(with_gil.kvf_run, _U32, _CHARS),
        pool_new=_function(with_gil.kvf_pool_new, _POINTER, _U32, _U32),
        pool_descriptor=_function(with_gil.kvf_pool_descriptor, ctypes.c_int, _POINTER),
        submit=_function(with_gil.kvf_submit, _I64, _POINTER, _CHARS),
        cancel=_function(with_gil.kvf_cancel, ctypes.c_int, _POINTER, _I64),
        reap=_function(with_gil.kvf_reap, _U32, _POINTER, _POINTER, _U32),
        pool_free=_function(without_gil.kvf_pool_free, None, _POINTER),
        lanes_new=_function(with_gil.kvf_lanes_new, _POINTER, _U32),
        lanes_descriptor=_function(with_gil.kvf_lanes_descriptor, ctypes.c_int, _POINTER),
        lanes_open=_function(with_gil.kvf_lanes_open, _I64, _POINTER, ctypes.c_int, _POINTER),
        lanes_submit=_function(with_gil.kvf_lanes_submit, _I64, _POINTER, _POINTER, _CHARS),
        # These wait for a piece.
        lanes_abandon=_function(without_gil.kvf_lanes_abandon, None, _POINTER, _POINTER),
        lanes_close_lane=_function(without_gil.kvf_lanes_close_lane, None, _POINTER, _POINTER),
        lanes_reap=_function(with_gil.kvf_lanes_reap, _U32, _POINTER, _POINTER, _POINTER, _U32),
        lanes_free=_function(without_gil.kvf_lanes_free, None, _POINTER),
        # The first call loads OpenSSL. A handshake takes less than a millisecond.
        tls_why_none=_function(without_gil.kvf_tls_why_none, _CHARS),
        tls_context_new=_function(
            with_gil.kvf_tls_context_new, _POINTER, _CHARS, _U64, _CHARS, _U64
        ),
        tls_context_free=_function(with_gil.kvf_tls_context_free, None, _POINTER),
        tls_new=_function(with_gil.kvf_tls_new, _POINTER, _POINTER, ctypes.c_int, _CHARS),
        tls_handshake=_function(with_gil.kvf_tls_handshake, ctypes.c_int, _POINTER),
        tls_read=_function(with_gil.kvf_tls_read, _I64, _POINTER, _POINTER, _U64),
        tls_write=_function(with_gil.kvf_tls_write, _I64, _POINTER, _CHARS, _U64),
        tls_free=_function(with_gil.kvf_tls_free, None, _POINTER),
    )


def _function(function: Any, result: type | None, *arguments: type) -> Any:
    function.restype = result
    function.argtypes = arguments
    return function
