"""Learning from one tenant's requests: turns, hazards, and the rule that reigns."""

import zlib
from collections.abc import Callable, Sequence
from itertools import repeat
from weakref import WeakSet

import numpy as np
import xxhash

from remote_server.protocol import Hint, Stretch
from remote_server.store.chains import joined
from remote_server.store.eviction.floor import Floor
from remote_server.store.eviction.hazard import UNKNOWN, Hazards
from remote_server.store.eviction.hints import KINDS, MAX_TURN, NO_HINT, Trust
from remote_server.store.eviction.paths import FEW, TABLE, Hashes, Path, Paths, Turns
from remote_server.store.eviction.tree import Tree
from remote_server.store.eviction.victims import Rule
from remote_server.turns import LOOKUP_KEYS_PER_STEP, Steps, parts, to_end

AGAIN_S = 1.0
"""A lookup of the same prompt within this time is the same request, until that is served. After it
only one of a part of the prompt is."""

REQUEST_S = 60.0
"""Gets within this time after a lookup are of the same request."""

MAX_SALTS = 4096

MAX_SAMPLED = 256
"""Keys of one request that are sampled, and that are in the shadows: its first ones. A key takes
some microseconds, and in a small cache each one is in the shadows: a request of 8,192 keys would
hold up all others."""

MAX_ALONE = 32
"""Of the keys of one lookup without chain fields so many are sampled, and are in the shadows, in
the mean: a larger one makes both hold fewer keys from then on, and each key has the same chance."""

STRETCH_KEYS = 256
"""A prompt takes as long as so many keys, beside its own: 0.2 ms when it is new."""

HASHED_PER_STEP = 4 * LOOKUP_KEYS_PER_STEP
"""Keys that are hashed in one step: 0.1 µs each."""

LEAST_SAMPLED = 1024
"""But not so few that a cache has less than about so many sampled keys: what is learned from them
is of all clients, and lookups of one must not take it from the others."""

SEED = 20

BY_USES = KINDS[0][NO_HINT]
"""Those of a request whose turn is not known."""

_ALONE = (UNKNOWN,)


class Learner:
    """Learns from the keys that requests name. One thread, one tenant.

    Tiers ask it for the paths of new blocks, for the classes of used ones, and for the rule.
    """

    def __init__(self, clock: Callable[[], float], rule: Rule | None = None) -> None:
        """`rule` reigns always; None for the better one."""
        self.clock = clock
        self.hazards = Hazards()
        self.floor = Floor(self.hazards, SEED)
        self.paths = Paths()
        self.num_blocks = 0
        """The places of the largest tier of this server; the owner sets it."""
        self._fits = -1  # the `num_blocks` of the last lookup
        self.trees: WeakSet[Tree] = WeakSet()
        """Those of the size classes of its tiers."""
        self._fixed = rule
        self.trust = Trust()
        self._turns = Turns()
        self._num_paths = 0
        self._salts: dict[str, int] = {}

    @property
    def rule(self) -> Rule:
        """The one that reigns."""
        return self._fixed or self.floor.reigning

    @property
    def num_bytes(self) -> int:
        """Memory that it takes beside the index, with the trees of its tiers, about."""
        trees = sum(tree.num_bytes for tree in self.trees)
        return (
            8 * TABLE + self.hazards.num_bytes + self.paths.num_bytes + self.floor.num_bytes + trees
        )

    # ── events ───────────────────────────────────────────────────────────────────────────

    def looked_up(
        self,
        namespace: str,
        keys: Sequence[bytes],
        chain: Sequence[Stretch],
        num_held: int,
        hint: Hint | None = None,
    ) -> None:
        """`looked_up_in_steps`, at once."""
        to_end(self.looked_up_in_steps(namespace, keys, chain, num_held, hint))

    def looked_up_in_steps(
        self,
        namespace: str,
        keys: Sequence[bytes],
        chain: Sequence[Stretch],
        num_held: int,
        hint: Hint | None = None,
    ) -> Steps[None]:
        """A request looked `keys` up, with these chain fields and this hint, or none. Memory has
        the first `num_held` of them. A step is a millisecond or two: one new prompt of 16,384 keys
        takes 10 ms, and 1,024 prompts of 16 take 200."""
        now = self.clock()
        if self._fits != self.num_blocks:
            self._fits = self.num_blocks
            self.hazards.fit(self.num_blocks)
            self.floor.fit(self.num_blocks)
        begin = spent = 0
        for stretch in joined(chain) if len(chain) > 1 else chain:
            cost = stretch.rows + STRETCH_KEYS
            if spent and spent + cost > LOOKUP_KEYS_PER_STEP:
                yield
                spent = 0
            spent += cost
            end = begin + stretch.rows
            if stretch.tokens:
                held = max(0, min(num_held - begin, stretch.rows))
                yield from self._one_prompt(
                    namespace, keys[begin:end], held, stretch.backwards, now, hint
                )
            else:
                yield from self._alone(namespace, keys[begin:end], now)
            begin = end
        yield from self._alone(namespace, keys[begin:], now)

    def arriving(self, namespace: str, keys: Sequence[bytes], chain: Sequence[Stretch]) -> None:
        """A put brings `keys`: those that no lookup named have the order of its chain fields."""
        begin = 0
        for stretch in joined(chain):
            end = begin + stretch.rows
            if stretch.tokens and self.paths.of(namespace, keys[begin]) is None:
                now = self.clock()
                to_end(self._one_prompt(namespace, keys[begin:end], 0, stretch.backwards, now))
            begin = end

    def touched(self, namespace: str, keys: Sequence[bytes]) -> None:
        """A level above used `keys`, the last of a prompt first."""
        now = self.clock()
        enough = MAX_SAMPLED * (max(self.hazards.mask, self.floor.mask) + 1)
        sampled, shadowed = self._sampled(self._numbers(namespace, keys[:enough]))
        self.hazards.use(sampled, BY_USES, now)
        self.floor.touch(shadowed, BY_USES, now)

    def path_of_get(self, namespace: str, key: bytes, now: float) -> Path | None:
        """The path of the request that gets `key`, if a lookup named it shortly before."""
        path = self.paths.of(namespace, key)
        if path is None or now - path.at >= REQUEST_S:
            return None
        path.served = True
        return path

    # ── helpers ──────────────────────────────────────────────────────────────────────────

    def _one_prompt(
        self,
        namespace: str,
        keys: Sequence[bytes],
        num_held: int,
        backwards: bool,
        now: float,
        hint: Hint | None = None,
    ) -> Steps[None]:
        if backwards:
            keys, num_held = keys[::-1], 0
        before = self.paths.of(namespace, keys[-1])
        if before is not None and _is_same(before, keys, now):
            if len(before.keys) == len(keys):  # not of a part of it, or of more
                before.num_held = num_held
            return
        numbers = yield from self._numbers_in_steps(namespace, keys)
        turn = min(self._turns.turn_of(numbers), MAX_TURN)
        self.trust.returned(self._turns.continued)
        kinds = KINDS[turn][self.trust.mark(namespace, hint, int(numbers[-1]))]
        self._num_paths += 1
        path = Path(self._num_paths, keys, kinds, now, num_held)
        # The last part first: the same prompt is recognised by its end.
        for begin in reversed(range(0, len(keys), LOOKUP_KEYS_PER_STEP)):
            self.paths.add(namespace, path, keys[begin : begin + LOOKUP_KEYS_PER_STEP])
            if begin:
                yield
        sampled, shadowed = self._sampled(numbers)
        self.hazards.use(sampled, kinds, now)
        yield from self.floor.request(shadowed, kinds, path.number, now, self.num_blocks)

    def _alone(self, namespace: str, keys: Sequence[bytes], now: float) -> Steps[None]:
        if keys:
            if len(keys) > MAX_ALONE:
                per_key = min(len(keys) // MAX_ALONE, self.num_blocks // LEAST_SAMPLED)
                self.hazards.thin(per_key)
                self.floor.thin(per_key)
            numbers = yield from self._numbers_in_steps(namespace, keys)
            sampled, shadowed = self._sampled(numbers)
            self.hazards.use(sampled, _ALONE, now)
            yield from self.floor.request_alone(shadowed, UNKNOWN, now, self.num_blocks)

    def _numbers_in_steps(self, namespace: str, keys: Sequence[bytes]) -> Steps[list[int] | Hashes]:
        """`_numbers`, and a step's end behind each part of many keys."""
        if len(keys) <= HASHED_PER_STEP:
            return self._numbers(namespace, keys)
        hashed: list[list[int] | Hashes] = []
        for part in parts(keys, HASHED_PER_STEP):
            hashed.append(self._numbers(namespace, part))
            yield
        return np.concatenate([np.asarray(one, np.uint64) for one in hashed])

    def _numbers(self, namespace: str, keys: Sequence[bytes]) -> list[int] | Hashes:
        """Hashes of 64 bits: as an array if they are many."""
        salt = self._salts.get(namespace)
        if salt is None:
            if len(self._salts) >= MAX_SALTS:
                self._salts.clear()
            salt = self._salts[namespace] = zlib.crc32(namespace.encode())
        hashes = map(xxhash.xxh3_64_intdigest, keys, repeat(salt))
        return [*hashes] if len(keys) <= FEW else np.fromiter(hashes, np.uint64, len(keys))

    def _sampled(self, numbers: list[int] | Hashes) -> tuple[list[int], list[int]]:
        """Those of which hazards are learned, and those in the shadows. Both are among those that
        `Floor.candidates` of the shadows names."""
        candidates, to_learn = self.floor.candidates, self.hazards.mask
        if isinstance(numbers, np.ndarray):
            numbers = numbers[numbers & np.uint64(candidates) == 0].tolist()
        elif candidates:
            numbers = [n for n in numbers if not n & candidates]
            if not numbers:
                return numbers, numbers
        learned = [n for n in numbers if not n & to_learn]
        bits = self.floor.bits
        shadowed = [n for n in numbers if not n & bits]
        return learned[:MAX_SAMPLED], shadowed[:MAX_SAMPLED]


def _is_same(before: Path, keys: Sequence[bytes], now: float) -> bool:
    """Whether a lookup of `keys` is of the request that looked `before` up."""
    if before.keys[-1] != keys[-1] or now - before.at >= AGAIN_S:
        return False
    return not before.served or len(keys) < len(before.keys)
