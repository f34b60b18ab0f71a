"""Fixtures with lanes, native and of the reference. Test modules name this file in
`pytest_plugins`."""

from contextlib import closing

import pytest
from lane_helpers import connected
from mover_helpers import choose
from tls_helpers import secured_end, secured_ends

from remote_server.native import make_lanes, why_no_tls


@pytest.fixture(params=["native", "python"])
def engine(request, monkeypatch):
    """The kind that `make_lanes` makes in this test."""
    choose(request.param, monkeypatch)
    return request.param


@pytest.fixture
def lanes(engine):
    with closing(make_lanes(2)) as lanes:
        yield lanes


@pytest.fixture(params=["plain", "tls"])
def wire(request, engine):
    """Whether the blocks are encrypted."""
    if request.param == "tls" and (reason := why_no_tls()):
        pytest.skip(reason)
    return request.param


@pytest.fixture
def link(lanes, wire):
    """A lane, and the far end of its connection."""
    near, far = connected()
    if wire == "tls":
        near, far = secured_end(near, far)
    with far:
        yield lanes.open(near), far


@pytest.fixture
def loop(lanes, wire):
    """Two lanes that are the ends of one connection."""
    ends = connected()
    return tuple(lanes.open(end) for end in (secured_ends(*ends) if wire == "tls" else ends))
