"""The kernel's count of this process's bytes to and from block devices.

Reads from the page cache are not counted, so this shows whether reads were cold.
"""

from pathlib import Path
from typing import NamedTuple


class DeviceBytes(NamedTuple):
    """Since the process began."""

    read: int
    written: int

    def since(self, before: "DeviceBytes") -> "DeviceBytes":
        return DeviceBytes(self.read - before.read, self.written - before.written)


def of_this_process(path: Path = Path("/proc/self/io")) -> DeviceBytes | None:
    """None where the kernel has no such file."""
    try:
        fields = dict(line.split(": ") for line in path.read_text().splitlines())
        return DeviceBytes(int(fields["read_bytes"]), int(fields["write_bytes"]))
    except (OSError, ValueError, KeyError):
        return None
