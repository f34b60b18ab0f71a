"""Which namespaces there are, what each was declared with, and by whom."""

import msgspec

from remote_server.config import format_bytes
from remote_server.errors import RequestRefused
from remote_server.gaps import compare
from remote_server.protocol import ErrorCode, NamespaceStats
from remote_server.store.disk.tier import DiskTier
from remote_server.store.slabs import memory_for_block
from remote_server.store.tier import Tier

# A deployment has one namespace per model and setting; each weight update makes another. This
# only bounds what a broken client can make us remember.
MAX_NAMESPACES = 1024

# Of one namespace, for whoever asks why two of them share nothing.
MAX_ENGINES_REMEMBERED = 16


class NamespaceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a client declared with its hello."""

    block_bytes: int
    client: str = ""
    fingerprint: dict[str, str] = {}
    engines: dict[str, dict[str, str]] = {}
    """Who declared it, the last one last: where each differs from `fingerprint`."""

    def after(self, known: "NamespaceInfo | None") -> "NamespaceInfo":
        """This, remembering who declared `known` before."""
        said: dict[str, dict[str, str]] = {}
        if known is not None:
            said = {name: known.fingerprint | differs for name, differs in known.engines.items()}
            said.pop(self.client, None)
        said[self.client] = self.fingerprint
        recent = dict(list(said.items())[-MAX_ENGINES_REMEMBERED:])
        engines = {
            name: {field: there for field, (_, there) in compare(self.fingerprint, facts).items()}
            for name, facts in recent.items()
        }
        return msgspec.structs.replace(self, engines=engines)


class Namespaces:
    """Those declared since the start, and those that only the disk knows."""

    def __init__(self, tier: Tier, disk: DiskTier | None) -> None:
        self.known: dict[str, NamespaceInfo] = {}
        """Most recently declared last."""
        self._tier = tier
        self._disk = disk

    def block_bytes_of(self, name: str) -> int:
        """Of one that was declared."""
        return self.known[name].block_bytes

    def declare(self, name: str, info: NamespaceInfo) -> None:
        """Make `name` known, or refresh who it is. Raises `RequestRefused`, changing nothing."""
        known = self.known.get(name)
        known_bytes = known.block_bytes if known is not None else None
        if known_bytes is None and self._disk is not None:
            known_bytes = self._disk.block_bytes_of(name)
        if known_bytes is not None and known_bytes != info.block_bytes:
            raise RequestRefused(
                ErrorCode.BLOCK_BYTES_MISMATCH,
                f"namespace {name!r} holds blocks of {known_bytes} bytes, "
                f"not {info.block_bytes}: use another namespace",
            )
        largest = self._tier.largest_block_bytes
        if info.block_bytes > largest:
            raise RequestRefused(
                ErrorCode.TOO_LARGE,
                f"a block of {info.block_bytes} bytes does not fit: with this --memory the "
                f"largest is {largest}; --memory {memory_for_block(info.block_bytes)} "
                f"({format_bytes(memory_for_block(info.block_bytes))}) would be enough",
            )
        if known is None and len(self.known) >= MAX_NAMESPACES:
            self._forget_an_empty_namespace()
        self.known[name] = info.after(self.known.pop(name, None))

    def _forget_an_empty_namespace(self) -> None:
        """Its client, if it ever comes back, is told UNKNOWN_NAMESPACE and says hello again."""
        for name in self.known:
            on_disk = self._disk is not None and self._disk.block_bytes_of(name) is not None
            if self._tier.num_blocks(name) == 0 and not on_disk:
                del self.known[name]
                return
        raise RequestRefused(
            ErrorCode.TOO_LARGE, f"{MAX_NAMESPACES} namespaces hold blocks already: clear some"
        )

    def stats(self) -> dict[str, NamespaceStats]:
        """Those declared, and those found on disk that nobody has declared since the start."""
        found = {} if self._disk is None else self._disk.namespaces()
        undeclared = {
            name: NamespaceInfo(block_bytes=block_bytes) for name, block_bytes in found.items()
        }
        return {
            name: NamespaceStats(
                block_bytes=info.block_bytes,
                blocks=self._tier.num_blocks(name),
                used_bytes=self._tier.used_bytes(name),
                disk_blocks=0 if self._disk is None else self._disk.num_blocks(name),
                disk_used_bytes=0 if self._disk is None else self._disk.used_bytes(name),
                client=info.client,
                fingerprint=info.fingerprint,
                engines=info.engines,
            )
            for name, info in (undeclared | self.known).items()
        }
