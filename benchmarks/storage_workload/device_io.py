"""What the kernel says this process has moved to and from block devices.

A read that the page cache answers is not counted there, so this shows whether cold reads were.
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
    """None where the kernel does not say."""
    try:
        fields = dict(line.split(": ") for line in path.read_text().splitlines())
        return DeviceBytes(int(fields["read_bytes"]), int(fields["write_bytes"]))
    except (OSError, ValueError, KeyError):
        return None
