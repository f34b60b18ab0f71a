"""A wall clock that a test sets, for a process that it starts: preloaded functions of the C library
add to the kernel's time what a file holds."""

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

_SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long long *jump;

__attribute__((constructor)) static void map_jump(void) {
    int file = open(getenv("KVFERRY_TEST_JUMP"), O_RDONLY);
    if (file >= 0) jump = mmap(0, sizeof *jump, PROT_READ, MAP_SHARED, file, 0);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = syscall(SYS_clock_gettime, clock, now);
    if (!result && jump && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += *jump;
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    int result = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return result;
}

time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now) *now = exact.tv_sec;
    return exact.tv_sec;
}
"""


class WallClock:
    """`environment` is for the process. Skips the test where there is no C compiler."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler: the clock of another process cannot be set")
        source, library = folder / "wall_clock.c", folder / "wall_clock.so"
        source.write_text(_SOURCE)
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source)]
        subprocess.run(command, check=True)
        self._file = folder / "jump"
        self._file.write_bytes(bytes(8))
        self.environment = {"LD_PRELOAD": str(library), "KVFERRY_TEST_JUMP": str(self._file)}

    def jump(self, seconds: float) -> None:
        """From now on it is so much ahead of the kernel's."""
        with self._file.open("r+b") as file:
            file.write(struct.pack("<q", int(seconds)))
