"""`kvferry why` of a list of servers: what each has of a block, and the block's homes."""

import argparse
from collections.abc import Iterable, Mapping

from remote_server.cli.blocks.blocks_lines import key_in, origin, place_of, report, settled, where
from remote_server.cli.figures.sums import sum_of
from remote_server.cli.figures.what_if_lines import why_lines
from remote_server.cli.output import print_lines
from remote_server.cli.servers import connected_to_each, print_failed
from remote_server.fleet.each import EachServer, Replies
from remote_server.fleet.placement import homes
from remote_server.fleet.server_list import ServerList
from remote_server.protocol import UNKNOWN, BlockCopy, Found, StatsReply, Stretch
from remote_server.protocol.codec import ascii_json
from remote_server.protocol.namespace_diff import all_gaps
from remote_server.runs import begins_run, run_of

_OWN_TIERS = ("memory", "disk")


def why(servers: ServerList, flags: argparse.Namespace) -> int:
    """Exit status 1 also when a server did not answer."""
    chosen = flags.about or ""
    with connected_to_each(servers, flags, fingerprints=True) as (each, replies):
        total = sum_of(replies.received)
        if (key := key_in(chosen, total.namespaces)) is not None:
            found = {
                name: _look_up(each, key, name, replies, flags.timeout_s)
                for name in total.namespaces
            }
            return _explain(servers, key, found, replies, flags)
    gaps = [gap for gap in all_gaps(total.namespaces) if gap.namespace.startswith(chosen)]
    known = [name for name in total.namespaces if name.startswith(chosen)]
    if flags.json:
        facts = {"gaps": [gap._asdict() for gap in gaps], "failed": replies.failed}
        print_lines(ascii_json(facts))
    elif not known:
        named = f" that begins with {chosen!r}" if chosen else ""
        print_lines(f"no engine has declared a namespace{named} on {_num(replies)}")
    else:
        print_lines(*report(total, known, gaps), *why_lines(total, known))
    print_failed(replies.failed)
    return 1 if gaps or replies.failed or not known else 0


def _num(replies: Replies[StatsReply]) -> str:
    return f"the {len(replies.received):,} servers that answered"


def _look_up(
    each: EachServer, key: bytes, namespace: str, replies: Replies[StatsReply], timeout_s: float
) -> dict[str, Found]:
    """The replies by server. Those that fail join the failed of `replies`."""

    def ask() -> dict[str, Found]:
        asked = each.ask(
            lambda one: one.lookup(namespace, (key,), explain=True, timeout_s=timeout_s),
            timeout_s,
            replies.received.keys() - replies.failed.keys(),
        )
        replies.failed |= asked.failed
        return asked.received

    return settled(ask, timeout_s)


def _explain(
    servers: ServerList,
    key: bytes,
    found: Mapping[str, Mapping[str, Found]],
    replies: Replies[StatsReply],
    flags: argparse.Namespace,
) -> int:
    readable = {
        namespace: having
        for namespace, of in found.items()
        if (having := {name: one for name, one in of.items() if one.prefix})
    }
    names = [one.name for one in servers.members]
    facts = []
    for namespace, having in readable.items():
        block = _known_best(having.values())
        first, second = homes(names, namespace, key)
        at_home = [names[first], names[second]] if _begins(block) else []
        copies = {name: next(iter(one.copies), []) for name, one in having.items()}
        facts.append(place_of(namespace, block) | {"homes": at_home, "copies": copies})
        if not flags.json:
            print_lines(f"{namespace}: {origin(block)}", *_places(block, at_home))
            print_lines(*_servers(names, replies, copies))
    if flags.json:
        full = {name: _full(one) for name, one in replies.received.items()}
        print_lines(ascii_json({"blocks": facts, "full": full, "failed": replies.failed}))
    elif not facts:
        print_lines(f"no namespace of {_num(replies)} has a readable block of this key")
    print_failed(replies.failed)
    return 0 if facts and not replies.failed else 1


def _known_best(found: Iterable[Found]) -> Stretch:
    """The place of the block in its prompt, which the client of one copy may not have sent."""
    chains = [next(iter(one.chain), UNKNOWN) for one in found]
    return next((one for one in chains if one.tokens), UNKNOWN)


def _begins(block: Stretch) -> bool:
    return bool(block.tokens) and begins_run(block.start, block.end)


def _places(block: Stretch, at_home: list[str]) -> list[str]:
    if not block.tokens:
        return ["  its run is not known, and so are its homes"]
    run = run_of(block.end)
    if at_home:
        return [f"  the first block of run {run}; homes: {at_home[0]}, then {at_home[1]}"]
    return [f"  in run {run}: the key of that run's first block decides the homes"]


def _servers(
    names: list[str], replies: Replies[StatsReply], copies: Mapping[str, list[BlockCopy]]
) -> list[str]:
    """What each server has of the block, and how full it is."""
    lines, width = [], max(map(len, names))
    for name in names:
        if name not in replies.received or name in replies.failed:
            lines.append(f"  {name:<{width}}  did not answer")
            continue
        has = "; ".join(where(one) for one in copies[name]) if name in copies else "-"
        full = 100 * _full(replies.received[name])
        lines.append(f"  {name:<{width}}  {full:3.0f} % full  {has or 'has it'}")
    return lines


def _full(reply: StatsReply) -> float:
    """The part of its memory and disk that is used."""
    own = [reply.tiers[tier] for tier in _OWN_TIERS if tier in reply.tiers]
    budget = sum(one.budget_bytes for one in own)
    return sum(one.used_bytes for one in own) / max(budget, 1)
