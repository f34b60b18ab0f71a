"""Servers of a list that moved to another address: the client of the old one is closed."""

from remote_server.client import ClientConfig, RemoteClient
from remote_server.fleet.fleet import Fleet
from remote_server.fleet.server_list import WatchedList, read_list


def listed(port: int) -> list[str]:
    """A list of two servers that are not there; `port` is that of the first one."""
    return [f"tcp://127.0.0.1:{port}?name=a", "tcp://127.0.0.1:2?name=b"]


def test_the_client_of_a_server_that_moved_is_closed_and_no_other(monkeypatch):
    closed = []
    close = RemoteClient.close

    def record(client, *timeout):
        closed.append(client)
        close(client, *timeout)

    fleet = Fleet(WatchedList(listed(1)), ClientConfig("tcp://127.0.0.1:1"))
    try:
        before = fleet.clients
        monkeypatch.setattr(RemoteClient, "close", record)
        fleet.membership.use(read_list(listed(3)))
        assert closed == [before["a"]]
        assert fleet.clients["a"] is not before["a"]
        assert fleet.clients["b"] is before["b"]
        assert fleet.names == ("a", "b"), "homes follow from the names"
        moved = fleet.clients["a"]
        fleet.membership.use(read_list(listed(3)[1:]))
        fleet.membership.use(read_list(listed(4)))
        assert closed == [before["a"], moved], "it left, and has another address now"
        assert fleet.clients["a"] is not moved and fleet.names == ("a", "b")
    finally:
        fleet.close(30)
