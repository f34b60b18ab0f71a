"""Descriptors of shared memory: what is closed keeps none, so that its memory is freed."""

import os

import pytest

from remote_server.shm.mapping import Arena
from remote_server.shm.region import SharedRegion, Tickets
from remote_server.values import MiB


@pytest.mark.parametrize("make", [lambda: Arena(1 * MiB), lambda: SharedRegion(1 * MiB), Tickets])
def test_what_is_closed_has_closed_its_file(make):
    shared = make()
    before = shared.fd
    assert os.fstat(before).st_size > 0
    shared.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(before)
