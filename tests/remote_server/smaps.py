"""The kernel's account of the maps of this process."""

from pathlib import Path


def map_at(address: int) -> dict[str, str]:
    """The lines of `/proc/self/smaps` for the map that begins at `address`, by their names. `Range`
    is its place, in hexadecimal digits."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{address:x}-"):
            found = {"Range": line.split()[0]}
            for fact in lines:
                name, _, value = fact.partition(":")
                found[name] = value.strip()
                if name == "VmFlags":  # the last one of each map
                    return found
    raise AssertionError("not mapped")


def mapped(what: str = "") -> int:
    """How many maps this process has of memfds whose names begin so."""
    with open("/proc/self/maps") as maps:
        return sum(f"memfd:{what}" in line for line in maps)
