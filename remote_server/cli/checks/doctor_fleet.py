"""Checks of `kvferry doctor` that concern a list of servers: names, and the lists of engines."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from remote_server.fleet.server_list import Member, ServerList
from remote_server.protocol import StatsReply

Found = tuple[str, str]
"""A verdict, `ok`, `note` or `bad`, and its reason with the remedy."""


class Asked(NamedTuple):
    """One server of the list, and its statistics, or why there are none."""

    member: Member
    reply: StatsReply | None
    error: str = ""


def name_of(servers: ServerList, member: Member, reply: StatsReply) -> Iterator[Found]:
    """Whether the server that answers for `member` is the one that the list names. Nothing for one
    server without a name."""
    if not member.name:
        return
    known = {one.name: one for one in servers.members}
    if not reply.name:
        yield "note", f"{member.endpoint} is of a version without names: none is checked there"
    elif reply.name == member.name:
        yield "ok", f"{reply.name}, as in the list"
    elif (other := known.get(reply.name)) is not None:
        text = f"{member.endpoint} is {reply.name}, which the list has at {other.endpoint}"
        yield "bad", f"{text}; the list calls it {member.name}: correct the list"
    else:
        text = f"{member.endpoint} has the name {reply.name}, which the list does not have"
        yield "bad", f"{text}: correct the list, or start the server with --name {member.name}"


def lists_of_engines(servers: ServerList, asked: Sequence[Asked]) -> Iterator[Found]:
    """The engines whose list has other names than `servers`."""
    others: dict[tuple[str, str], list[str]] = {}
    num_same = 0
    for member, reply, _ in asked:
        for digest, engines in ({} if reply is None else reply.fleets).items():
            if digest == servers.digest:
                num_same += len(engines)
                continue
            for engine in engines:
                others.setdefault((engine or "an engine without a name", digest), []).append(
                    member.name or member.endpoint
                )
    for (engine, digest), where in sorted(others.items()):
        text = f"{engine} has another list of servers, digest {digest}; this one has"
        seen = f"{servers.digest}. Seen at {_some(where)}"
        yield "bad", f"{text} {seen}. Blocks are found by engines that agree"
    if num_same and not others:
        yield "ok", f"all engines that are connected have this list, digest {servers.digest}"


def _some(names: Iterable[str], most: int = 3) -> str:
    shown = [*names]
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more
