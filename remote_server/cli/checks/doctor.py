"""`kvferry doctor`: checks of this host, the bucket, the server, and agreement of its engines."""

import argparse
import json
import os
import resource
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from remote_server.cli.checks import doctor_bucket, doctor_engine
from remote_server.cli.checks.doctor_bucket import of_server, of_settings
from remote_server.cli.checks.doctor_fleet import Asked, lists_of_engines, name_of
from remote_server.cli.connection import ask_stats, client_of, connected
from remote_server.cli.exit_status import NoServer
from remote_server.cli.flags import add_json
from remote_server.cli.output import print_lines
from remote_server.cli.parser import Command, Parser
from remote_server.cli.servers import add_servers, servers_of
from remote_server.client import RemoteClient, SharedRegion
from remote_server.fleet.server_list import Member, ServerList
from remote_server.native.mover import what_moves
from remote_server.protocol import SELF_TESTS, StatsReply
from remote_server.protocol.codec import ascii_json
from remote_server.protocol.namespace_diff import all_gaps
from remote_server.server.reports.identity import server_version
from remote_server.values import GiB, MiB, format_bytes

# vLLM needs it for its own messages between processes; containers have 64 MiB by default.
_LITTLE_SHM = 1 * GiB
# A TTL or a log read across two hosts is off by this; nothing else here depends on wall clocks.
_CLOCK_S = 2.0
# For an untested version it reads some 2 MB of source: a second.
_JUDGED_WITHIN_S = 60.0
_AT_ONCE = 32  # servers of a list


class Finding(NamedTuple):
    """One check: `ok`, `note` (works, could be better) or `bad`; with the remedy."""

    check: str
    verdict: str
    told: str


def add_flags(parser: Parser) -> None:
    add_servers(parser)
    doctor_bucket.add_flags(parser)
    doctor_engine.add_flags(parser)
    add_json(parser)


def run(flags: argparse.Namespace) -> int:
    findings = list(host_findings())
    findings += [Finding("bucket", *found) for found in of_settings(flags)]
    findings += [Finding("engine", *found) for found in doctor_engine.of_engines(flags)]
    servers = servers_of(flags)
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        ask = partial(_asked, flags.timeout_s)
        answers = [*threads.map(ask, servers.members)]
    for answer in answers:
        where = f"{answer.asked.member.name}: " if len(answers) > 1 else ""
        findings += [one._replace(check=where + one.check) for one in _findings_of(servers, answer)]
    lists = lists_of_engines(servers, [answer.asked for answer in answers])
    findings += [Finding("lists", *found) for found in lists]
    status = 0
    if len(answers) == 1:
        if answers[0].asked.reply is None:
            status = 3
        else:
            address = _address_of(servers.members[0])
            findings += _transports(address, flags.timeout_s)
    if flags.json:
        print_lines(ascii_json([finding._asdict() for finding in findings]))
    else:
        width = max(len(finding.check) for finding in findings)
        for check, verdict, text in findings:
            colour = {"ok": "green", "note": "yellow", "bad": "red"}[verdict]
            print_lines(f"  {check:<{width}}  {text}", mark=f"{verdict:<4}", colour=colour)
    if any(finding.verdict == "bad" for finding in findings):
        return status or 1
    return 0


class _Answer(NamedTuple):
    """What a server answered, and our wall clock in the middle of its answer."""

    asked: Asked
    now_s: float = 0.0


def _asked(timeout_s: float, member: Member) -> _Answer:
    """The statistics of one server. Raises `ConfigError` for a key file that cannot be read."""
    try:
        given = argparse.Namespace(server=_address_of(member), timeout_s=timeout_s)
        with connected(given) as client:
            began = time.time()
            reply = ask_stats(client, timeout_s, fingerprints=True)
            return _Answer(Asked(member, reply), (began + time.time()) / 2)
    except NoServer as error:
        return _Answer(Asked(member, None, str(error)))


def _address_of(member: Member) -> str:
    return f"{member.endpoint}?keys={member.keys}" if member.keys else member.endpoint


def _findings_of(servers: ServerList, answer: _Answer) -> Iterable[Finding]:
    member, reply, error = answer.asked
    if reply is None:
        yield Finding("server", "bad", error)
        return
    yield from server_findings(_address_of(member), reply, answer.now_s)
    yield from (Finding("name", *found) for found in name_of(servers, member, reply))


def host_findings(
    proc: Path = Path("/proc"),
    sys_: Path = Path("/sys"),
    shm: Path = Path("/dev/shm"),
) -> Iterable[Finding]:
    """Checks of this host, with or without a server."""
    yield _shm_size(shm)
    yield _locked_memory()
    yield _huge_pages(sys_)
    yield _clock_source(sys_)
    yield _hash_seed()
    yield _mover("mover", what_moves())
    yield _vllm()


def _shm_size(shm: Path) -> Finding:
    try:
        size = shutil.disk_usage(shm)
    except OSError:
        return Finding("shared memory", "bad", f"{shm} is missing: vLLM needs it")
    text = f"{shm} has {format_bytes(size.free)} free of {format_bytes(size.total)}"
    if size.total < _LITTLE_SHM:
        return Finding("shared memory", "bad",
                       f"{text}; vLLM needs more: docker run --shm-size=4g")  # fmt: skip
    return Finding("shared memory", "ok", text)


def _locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("locked memory", "ok", "unlimited")
    return Finding("locked memory", "note",
                   f"{format_bytes(soft)}: on a GPU host vLLM pins the CPU pool, which wants "
                   "`ulimit -l unlimited`")  # fmt: skip


def _huge_pages(sys_: Path) -> Finding:
    setting_file = sys_ / "kernel/mm/transparent_hugepage/shmem_enabled"
    setting = _read(setting_file)
    chosen = setting.partition("[")[2].partition("]")[0]
    if chosen in ("always", "within_size", "advise", "force"):
        return Finding("huge pages", "ok", f"for shared memory: {chosen}")
    return Finding("huge pages", "note",
                   f"for shared memory: {chosen or 'not known'}; a server's memory would be "
                   f"touched faster, and filled faster from a virtual disk, after `echo advise > "
                   f"{setting_file}`, as root, before its start")  # fmt: skip


def _clock_source(sys_: Path) -> Finding:
    source = _read(sys_ / "devices/system/clocksource/clocksource0/current_clocksource")
    if source in ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page"):
        return Finding("clock source", "ok", source)
    return Finding("clock source", "note", f"{source or 'not known'}: reading it may be slow")


def _hash_seed() -> Finding:
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is None:
        return Finding("hash seed", "ok", "vLLM's own, the same in every engine that uses sha256")
    text = f"PYTHONHASHSEED={seed}: engines find only what was stored with the same"
    return Finding("hash seed", "note", text)


def _lanes(lanes: str) -> Finding:
    if lanes.startswith("none"):
        return Finding("lanes", "note", f"{lanes}; blocks go through ZeroMQ, which is slower")
    return Finding("lanes", "ok", lanes)


def _mover(check: str, mover: str) -> Finding:
    if mover.startswith("native"):
        return Finding(check, "ok", mover)
    return Finding(check, "note", f"{mover}; the C library would move blocks faster")


def _vllm() -> Finding:
    """The vLLM beside this package, judged by a process of the connector: no import of it here."""
    judge = [sys.executable, "-m", "kv_connector.vllm_support", "--json"]
    ran = subprocess.run(judge, capture_output=True, text=True, timeout=_JUDGED_WITHIN_S)
    if ran.returncode == 2:
        return Finding("vLLM", "ok", "none in this Python: a server needs none")
    if not ran.stdout:
        why = (ran.stderr.strip().splitlines() or ["no answer"])[-1]
        return Finding("vLLM", "note", f"not judged: {why}")
    verdict = json.loads(ran.stdout)
    if verdict["refusal"]:
        return Finding("vLLM", "bad", verdict["refusal"])
    if not verdict["tested"]:
        text = f"{verdict['version']}: not tested, but it has all that is needed"
        return Finding("vLLM", "note", text)
    return Finding("vLLM", "ok", f"{verdict['version']}: tested")


def server_findings(address: str, reply: StatsReply, now_s: float) -> Iterable[Finding]:
    """Checks of the server by its own statistics."""
    text = f"{reply.server} answers at {address}"
    ours = server_version()
    if reply.server != ours:
        yield Finding("server", "note", f"{text}; this side is {ours}")
    else:
        yield Finding("server", "ok", text)
    if reply.mover:
        yield _mover("server's mover", reply.mover)
    if reply.lanes:
        yield _lanes(reply.lanes)
    if reply.time_s:
        ahead = reply.time_s - now_s
        far = abs(ahead) > _CLOCK_S
        yield Finding(
            "clocks", "note" if far else "ok", f"the server's is {ahead:+.1f} s from ours"
        )
    for name, tier in reply.tiers.items():
        used = f"{tier.used_bytes / max(tier.budget_bytes, 1):.0%} of"
        if name == "bucket":  # it holds more than this server knows of
            used = f"{format_bytes(tier.used_bytes)} known, budget"
        budget = format_bytes(tier.budget_bytes) if tier.budget_bytes else "none"
        yield Finding(f"tier {name}", "ok", f"{used} {budget}, {tier.blocks:,} blocks")
    yield from (Finding("bucket", *found) for found in of_server(reply))
    failed = reply.counters.get("failed_checks", 0)
    if failed:
        yield Finding("books", "bad", f"{failed} failed checks: a bug; please report it")
    errors = reply.counters.get("internal_errors", 0)
    if errors:
        yield Finding("failures", "bad", f"{errors} failures inside the server: its log has them")
    damaged = reply.counters.get("integrity_checksum", 0)
    if damaged:
        yield Finding("integrity", "bad", f"{damaged} blocks were damaged in memory: bad RAM?")
    gaps = all_gaps(reply.namespaces)
    if not reply.namespaces:
        yield Finding("engines", "note", "none has declared a namespace yet")
    elif not gaps:
        yield Finding("engines", "ok", f"{len(reply.namespaces)} namespaces, no two nearly equal")
    for gap in gaps:
        yield Finding("engines", "bad", gap.line())


def _transports(address: str, timeout_s: float) -> Iterable[Finding]:
    """Whether a client on this host is given shared memory, and lanes. Removes its namespace from
    the server."""
    region = SharedRegion(1 * MiB)
    with _client(address, timeout_s) as client:
        client.register(region.view, region.fd)
        if _within(timeout_s, lambda: client.transport == "shm"):
            text = "shared memory: this host and the server's are one"
        else:
            text = "tcp: the server is on another host, or takes only tcp"
        yield Finding("transport", "ok", text)
    region.close()
    with _client(address, timeout_s, transport="tcp") as client:
        _within(timeout_s, lambda: any(client.lanes))
        num_open, reason = client.lanes
    if num_open:
        yield Finding("lanes from here", "ok", "open: blocks over tcp go beside ZeroMQ")
    else:
        why = reason or f"none within {timeout_s:g} s"
        text = f"{why}; blocks over tcp go over ZeroMQ, which is slower"
        yield Finding("lanes from here", "note", text)


@contextmanager
def _client(address: str, timeout_s: float, **options: str) -> Iterator[RemoteClient]:
    """A client with a namespace, which it removes from the server."""
    namespace = f"{SELF_TESTS}doctor/{secrets.token_hex(8)}"
    client = client_of(address, client_name="kvferry doctor", **options)
    try:
        client.declare(namespace, 4096)
        yield client
    finally:
        client.forget(namespace)
        client.clear(namespace, forget=True, timeout_s=timeout_s).exception(timeout_s + 1)
        client.close()


def _within(timeout_s: float, so: Callable[[], object]) -> bool:
    ends_by = time.monotonic() + timeout_s
    while time.monotonic() < ends_by:
        if so():
            return True
        time.sleep(0.01)
    return bool(so())


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


COMMAND = Command(
    add_flags,
    run,
    description="Check this host, the bucket of these settings, the server, and whether its "
    "engines agree. Of a list every server is checked, its name, and whether engines have the "
    "same list. In the bucket an object is written, read and removed. Exit status 1 when something "
    "is bad, also a server of a list that does not answer; 3 when the only one does not.",
    examples="""\
kvferry doctor
kvferry doctor --engine http://127.0.0.1:8000        # does it compute what the server has?
kvferry doctor --bucket s3://kv-cache/prod           # before a server uses it
""",
)
