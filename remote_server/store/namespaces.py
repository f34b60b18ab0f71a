"""Namespaces: their declarations, and the engines that made them."""

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from sys import getsizeof

import msgspec

from remote_server.errors import RequestRefused
from remote_server.plain_text import FewLines, plain
from remote_server.protocol import ErrorCode, NamespaceStats
from remote_server.protocol.namespace_diff import compare
from remote_server.store.memory.slabs import memory_for_block
from remote_server.store.stack.tier_stack import TierStack
from remote_server.values import MiB, format_bytes

log = logging.getLogger(__name__)

# A deployment has one namespace per model and setting; each weight update makes another. The limit
# bounds the memory that a broken client can take.
MAX_NAMESPACES = 1024

# Of one namespace, to explain why two engines share no blocks.
MAX_ENGINES_REMEMBERED = 16

# Fingerprints and names of engines in memory, of all namespaces of a tenant.
MAX_TEXT_BYTES = 4 * MiB

TEXT_BYTES = 100
"""The cost of a text beside its characters: an entry of a map."""

COUNTERS = (
    "namespaces_evicted_empty", "namespaces_evicted_idle", "namespaces_evicted_held",
    "fingerprints_forgotten",
)  # fmt: skip


class NamespaceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The declaration in a client's hello."""

    block_bytes: int
    client: str = ""
    fingerprint: dict[str, str] = {}
    engines: dict[str, dict[str, str]] = {}
    """The engines that declared it, the last one last: the fields that differ from `fingerprint`.
    """
    connection: bytes = b""
    """The connection that declared it last."""
    forgotten: bool = False
    """Whether its texts were discarded to make room for newer ones."""

    def after(self, known: "NamespaceInfo | None") -> "NamespaceInfo":
        """This declaration, with the engines of the previous one, `known`."""
        texts: dict[str, dict[str, str]] = {}
        if known is not None:
            texts = {name: known.fingerprint | differs for name, differs in known.engines.items()}
            texts.pop(self.client, None)
        texts[self.client] = self.fingerprint
        recent = dict(list(texts.items())[-MAX_ENGINES_REMEMBERED:])
        engines = {
            name: {field: there for field, (_, there) in compare(self.fingerprint, facts).items()}
            for name, facts in recent.items()
        }
        return msgspec.structs.replace(self, engines=engines)

    @property
    def text_bytes(self) -> int:
        """The memory that its texts take."""
        texts = [self.client, *self.fingerprint, *self.fingerprint.values()]
        for name, differs in self.engines.items():
            texts += [name, *differs, *differs.values()]
        return sum(map(getsizeof, texts)) + TEXT_BYTES * len(texts)

    def without_texts(self) -> "NamespaceInfo":
        return msgspec.structs.replace(self, client="", fingerprint={}, engines={}, forgotten=True)


class Namespaces:
    """Those declared since the start, and those known from a tier below memory alone."""

    def __init__(
        self,
        tier_stack: TierStack,
        counters: Counter[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.known: dict[str, NamespaceInfo] = {}
        """The most recently declared last. Changed by this class alone."""
        self.text_bytes = 0
        """The memory that their texts take."""
        self._texts: dict[str, int] = {}  # bytes of each that has any; the oldest is first
        self._used: OrderedDict[str, None] = OrderedDict()  # of `known`, the longest unused first
        self._counters = Counter() if counters is None else counters
        self._lines = FewLines(log, clock)
        self._memory = tier_stack.memory
        self._tier_stack = tier_stack

    def block_bytes_of(self, name: str) -> int:
        """Of a namespace with blocks. It need not have been declared since the start."""
        known = self.known.get(name)
        if known is not None:
            return known.block_bytes
        return self._tier_stack.namespaces_below()[name]

    @property
    def names(self) -> list[str]:
        """Those declared, and those below memory that no client has declared since the start."""
        return [*{**self._tier_stack.namespaces_below(), **self.known}]

    def use(self, name: str) -> None:
        """A request names `name`, declared or not."""
        if name in self._used:
            self._used.move_to_end(name)

    def declare(self, name: str, info: NamespaceInfo) -> None:
        """Add `name`, or refresh its declaration. Raises `RequestRefused`, changing nothing.

        An empty namespace may be declared with another `block_bytes`. Beyond `MAX_NAMESPACES`
        another one is evicted, with its blocks in memory.
        """
        known = self.known.get(name)
        known_bytes = self._block_bytes_in_use(name)
        if known_bytes is not None and known_bytes != info.block_bytes:
            raise RequestRefused(
                ErrorCode.BLOCK_BYTES_MISMATCH,
                f"namespace {name!r} holds blocks of {known_bytes} bytes, "
                f"not {info.block_bytes}: use another namespace",
            )
        largest = self._memory.slabs.slab_bytes
        if info.block_bytes > largest:
            raise RequestRefused(
                ErrorCode.TOO_LARGE,
                f"a block of {info.block_bytes} bytes does not fit: with this --memory the "
                f"largest is {largest}; --memory {memory_for_block(info.block_bytes)} "
                f"({format_bytes(memory_for_block(info.block_bytes))}) would be enough",
            )
        if known is None and len(self.known) >= MAX_NAMESPACES:
            self._evict_one()
        self.forget(name)
        self.known[name] = info.after(known)
        self._tier_stack.declared[name] = info.block_bytes
        self._used[name] = None
        self._texts[name] = self.known[name].text_bytes
        self.text_bytes += self._texts[name]
        while self.text_bytes > MAX_TEXT_BYTES:
            self._forget_texts()

    def forget(self, name: str) -> None:
        """Remove the declaration. The blocks stay."""
        self.text_bytes -= self._texts.pop(name, 0)
        self._used.pop(name, None)
        self.known.pop(name, None)
        self._tier_stack.declared.pop(name, None)

    def stats(self, *, texts: bool = True) -> dict[str, NamespaceStats]:
        """Those declared, and those below memory that no client has declared since the start;
        without `texts`, fingerprints and engines are omitted."""
        found = self._tier_stack.namespaces_below()
        undeclared = {
            name: NamespaceInfo(block_bytes=block_bytes) for name, block_bytes in found.items()
        }
        return {
            name: NamespaceStats(
                block_bytes=info.block_bytes,
                tiers=self._tier_stack.shares_of(name),
                client=info.client,
                fingerprint=info.fingerprint if texts else {},
                engines=info.engines if texts else {},
                forgotten=info.forgotten,
            )
            for name, info in (undeclared | self.known).items()
        }

    # ── helpers ──────────────────────────────────────────────────────────────────────────

    def _block_bytes_in_use(self, name: str) -> int | None:
        """The `block_bytes` of the blocks of `name`; None when it has no blocks."""
        known = self.known.get(name)
        if known is not None and not self._memory.is_empty(name):
            return known.block_bytes
        return self._tier_stack.namespaces_below().get(name)

    def _evict_one(self) -> None:
        """Evict a namespace. Its client's next put gets UNKNOWN_NAMESPACE, and the client declares
        it again.

        The connection with most declarations loses one, so that a client that declares without end
        evicts its own. Of these a namespace without blocks goes first, then the longest unused. One
        with blocks that are pinned or being written goes last.
        """
        declared = Counter(info.connection for info in self.known.values())
        below = self._tier_stack.namespaces_below()
        empty = {name for name in self._used if name not in below and self._memory.is_empty(name)}
        coldest = sorted(
            self._used, key=lambda name: (-declared[self.known[name].connection], name not in empty)
        )
        name = next((name for name in coldest if not self._memory.is_in_use(name)), "")
        reason = "empty" if name in empty else "idle"
        if not name:
            name, reason = coldest[0], "held"
        self._counters[f"namespaces_evicted_{reason}"] += 1
        self._lines.say(
            logging.WARNING,
            "%d namespaces are declared: %s is evicted for another, with %d blocks in memory (%s)",
            len(self.known), plain(name), self._memory.num_blocks(name), reason,
        )  # fmt: skip
        self._counters["removed"] += self._memory.clear(name)
        self.forget(name)

    def _forget_texts(self) -> None:
        """Discard the texts of the longest declared namespace that has any."""
        oldest = next(iter(self._texts))
        self.text_bytes -= self._texts.pop(oldest)
        self.known[oldest] = self.known[oldest].without_texts()
        self._counters["fingerprints_forgotten"] += 1
        self._lines.say(
            logging.WARNING,
            "fingerprint and engines of %s are discarded: those of all namespaces may take %s",
            plain(oldest), format_bytes(MAX_TEXT_BYTES),
        )  # fmt: skip
