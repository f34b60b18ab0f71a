"""Fixtures with lanes, native and of the reference. Test modules name this file in
`pytest_plugins`."""

from contextlib import closing

import pytest
from lane_helpers import connected
from mover_helpers import choose

from remote_server.native import make_lanes


@pytest.fixture(params=["native", "python"])
def engine(request, monkeypatch):
    """The kind that `make_lanes` makes in this test."""
    choose(request.param, monkeypatch)
    return request.param


@pytest.fixture
def lanes(engine):
    with closing(make_lanes(2)) as lanes:
        yield lanes


@pytest.fixture
def link(lanes):
    """A lane, and the far end of its connection."""
    near, far = connected()
    with far:
        yield lanes.open(near), far


@pytest.fixture
def loop(lanes):
    """Two lanes that are the ends of one connection."""
    return tuple(lanes.open(end) for end in connected())
