"""The report's section on the device: what it is, its state before the run, and whether the run was
long enough for a steady state."""

from collections.abc import Iterator, Mapping
from typing import Any


def lines(document: Mapping[str, Any]) -> Iterator[str]:
    """The device only for a run with a disk tier in this process. Older documents have less."""
    if "disk" in document["tiers"]:
        yield from _device(document)
        yield _preconditioning(document.get("preconditioning"))
    if found := document.get("steady_state"):
        yield from _steady_state(found)


def _device(document: Mapping[str, Any]) -> Iterator[str]:
    facts = document.get("storage", {}).get("cache_dir")
    if facts is None:
        yield "Device: not shown by the kernel"
        return
    about = [facts.get("model", "no model shown"), facts["device"]]
    about += [f"{name.replace('_', ' ')} {facts[name]}" for name in ("scheduler", "write_cache")
              if name in facts]  # fmt: skip
    yield f"Device: {', '.join(about)}"
    direct = document["device"].get("direct")
    way = {True: ", O_DIRECT", False: ", through the page cache"}.get(direct, "")
    yield f"File system: {facts['type']}, mounted {facts['options']}{way}"


def _preconditioning(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "Preconditioned: no, the files of the disk tier were new"
    written, whole = found["written_bytes"] / 1e9, found["disk_bytes"] / 1e9
    took = f"{written:.2f} GB in {found['seconds']:.1f} s, for a disk tier of {whole:.2f} GB"
    if not found["written_once"]:
        return f"Preconditioned: not whole, {took}"
    return f"Preconditioned: yes, every file written once: {took}"


def _steady_state(found: Mapping[str, Any]) -> Iterator[str]:
    if found["why_not_judged"]:
        yield f"Steady state: {found['state']}: {found['why_not_judged']}"
        return
    yield f"Steady state: {found['state']}, by {found['rule']}"
    yield f"Rounds of {found['round_s']:.0f} s:"
    for figure in found["figures"]:
        verdict = "steady" if figure["steady"] else "NOT steady"
        yield (
            f"  {figure['name']}: {figure['average']:.3f} GB/s, range "
            f"{figure['range_percent']:.0f} %, fit {figure['slope_percent']:.0f} %: {verdict}"
        )
