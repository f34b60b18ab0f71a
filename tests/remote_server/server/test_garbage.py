"""The garbage collector's passes skip what survived earlier ones."""

import gc
from weakref import ref

import pytest

from remote_server import garbage
from remote_server.admin.admin import Admin
from remote_server.cli.serving.serve import _begin
from remote_server.garbage import only_new_collected
from remote_server.server.config import ServerConfig
from remote_server.server.server import Server
from remote_server.values import MiB


class Node:
    """Refers to itself: only a pass of the collector frees it."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def no_pass_of_its_own():
    gc.disable()
    gc.unfreeze()
    with only_new_collected():
        yield
    gc.freeze()
    gc.enable()


def test_what_survives_a_full_pass_is_in_no_later_one_but_that_over_all(monkeypatch):
    monkeypatch.setattr(garbage, "WHOLE_EVERY", 4)
    survivor = Node()
    gc.collect()
    gone = ref(survivor)
    del survivor
    gc.collect()
    assert gone() is not None
    for _ in range(4):
        gc.collect()
    assert gone() is None


def test_new_garbage_is_collected_in_every_full_pass():
    gc.collect()
    gone = ref(Node())
    gc.collect()
    assert gone() is None


def test_what_a_server_has_made_when_it_is_ready_is_in_no_later_pass():
    config = ServerConfig(memory=64 * MiB, bind="tcp://127.0.0.1:*", admin="off")
    with Admin(config) as admin, Server(config) as server:
        assert gc.get_freeze_count() == 0
        _begin(admin, server)
        assert gc.get_freeze_count() > 0


def test_a_pass_over_the_young_ones_keeps_no_others_out():
    gc.unfreeze()
    gc.collect(1)
    assert gc.get_freeze_count() == 0
