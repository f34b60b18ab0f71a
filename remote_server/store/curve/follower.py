"""The follower of a tenant's requests: shows lookups, puts, pins and removals to its curve."""

import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import repeat
from typing import NamedTuple

import numpy as np
import xxhash

from remote_server.protocol import SELF_TESTS, Stretch, WhatIf
from remote_server.store.chains import continues, joined
from remote_server.store.curve.curve import Answer, Curve, Learned, Prompt
from remote_server.store.curve.hot import Names
from remote_server.store.eviction.learner import (
    AGAIN_S,
    BY_USES,
    HASHED_PER_STEP,
    MAX_SALTS,
    Learner,
)
from remote_server.turns import Steps, parts, to_end

log = logging.getLogger(__name__)

MOST_ENDS = 4096
"""Ends of prompts that are remembered, to recognise the same request."""

ROWS_PER_STEP, ROWS_OF_A_STRETCH = 2048, 32
"""Short stretches are one step, of so many keys; each costs as much as so many more keys do."""


MOST_ARRIVED = 256
"""Keys of puts that wait for `Follower.catch_up`. So a put of 64 blocks in four messages takes the
loop 2.7 ms; shown message by message it took 4.6."""


class Arrived(NamedTuple):
    """Keys that a put brought, in the order of their prompt."""

    namespace: str
    keys: list[bytes]
    stretch: Stretch
    block_bytes: int
    at: float


class Follower:
    """Of one tenant. One thread.

    Requests do not depend on models: a failure in one is logged, and ends the following.
    """

    def __init__(
        self, curve: Curve, clock: Callable[[], float], learner: Learner | None = None,
        rooms: Callable[[int], Mapping[str, float]] | None = None, seed: int | None = None,
    ) -> None:  # fmt: skip
        """`learner` is the one that the tenant's tiers follow. `rooms` has how many bytes of blocks
        of a size each tier has room for; None: its budget. `seed` decides which keys are in the
        sample; None: a number that no client knows, so that none can choose the sampled keys."""
        self.curve: Curve | None = curve
        """None after a failure."""
        self._clock = clock
        self._learner = learner
        self._rooms = rooms
        self._prompt_ends: OrderedDict[tuple[str, bytes], tuple[float, int, int]] = OrderedDict()
        """To the time, the number of keys, and the learner's number of the request."""
        self._seed = secrets.randbits(64) if seed is None else seed
        self._salts: dict[str, int] = {}
        self._arrived: list[Arrived] = []
        self._num_arrived = 0
        """Their keys."""

    # ── events ───────────────────────────────────────────────────────────────────────────

    def looked_up(
        self,
        namespace: str,
        keys: Sequence[bytes],
        chain: Sequence[Stretch],
        block_bytes: int,
        states: bytes,
        found: Mapping[str, int],
    ) -> Steps[None]:
        """A lookup of `keys` was answered with `states`, after the learner learned of it. Each tier
        has the first `found` keys, together with those above it."""
        self.catch_up()
        curve = self.curve
        if curve is None or namespace.startswith(SELF_TESTS):
            return
        with self._ends_following():
            now, begin, in_step = self._clock(), 0, 0
            for stretch in _stretches(chain, len(keys)):
                in_step += stretch.rows + ROWS_OF_A_STRETCH
                if begin and in_step > ROWS_PER_STEP:
                    yield
                    in_step = stretch.rows + ROWS_OF_A_STRETCH
                end = begin + stretch.rows
                part, of_part = keys[begin:end], states[begin:end]
                first = {tier: min(max(0, n - begin), len(part)) for tier, n in found.items()}
                if stretch.backwards:
                    part, of_part, first = part[::-1], of_part[::-1], dict.fromkeys(found, 0)
                learned = self._learned(namespace, part)
                is_again = self._is_again(namespace, part, learned, now, bool(stretch.tokens))
                if not is_again and not _repeats(part):
                    prompt = yield from self._prompt(namespace, part, stretch, block_bytes)
                    yield from curve.request(prompt, Answer(of_part, first), learned, now)
                begin = end

    def arriving(
        self, namespace: str, keys: Sequence[bytes], chain: Sequence[Stretch], block_bytes: int
    ) -> None:
        """A put brings `keys`, after the learner learned of it. They are shown to the curve by
        `catch_up`, or before the next event that depends on them: many at a time cost it less."""
        if self.curve is None or namespace.startswith(SELF_TESTS):
            return
        with self._ends_following():
            now, begin = self._clock(), 0
            for stretch in _stretches(chain, len(keys)):
                end = begin + stretch.rows
                part = keys[begin:end][::-1] if stretch.backwards else keys[begin:end]
                self._arrived.append(Arrived(namespace, [*part], stretch, block_bytes, now))
                begin = end
            self._num_arrived += len(keys)

    @property
    def is_behind(self) -> bool:
        """`catch_up` is due."""
        return self._num_arrived >= MOST_ARRIVED

    def catch_up(self) -> None:
        """Show what puts have brought to the curve."""
        if not self._arrived:
            return
        arrived, self._arrived, self._num_arrived = self._arrived, [], 0
        with self._ends_following():
            for namespace, keys, stretch, block_bytes, at in _joined(arrived):
                if self.curve is not None and not _repeats(keys):
                    prompt = to_end(self._prompt(namespace, keys, stretch, block_bytes))
                    self.curve.stored(prompt, self._learned(namespace, keys), at)

    def declined(self, namespace: str, keys: Sequence[bytes]) -> None:
        """Puts of `keys` were declined."""
        if self.curve is not None:
            with self._ends_following():
                self.curve.declined(self._names(namespace, keys))

    def touched(self, namespace: str, keys: Sequence[bytes]) -> None:
        """A level above used `keys`, the last of a prompt first."""
        self.catch_up()
        if self.curve is not None:
            with self._ends_following():
                self.curve.touch(self._names(namespace, keys), BY_USES, self._clock())

    def left(self, namespace: str, key: bytes) -> None:
        """The block of `key` has left all tiers."""
        curve = self.curve
        if curve is None:
            return
        name = xxhash.xxh3_64_intdigest(key, self._salt(namespace))
        if curve.follows(name):  # most names are left out, in half a microsecond
            with self._ends_following():
                curve.left(name)

    def removing(self) -> AbstractContextManager[None]:
        """What leaves meanwhile does so for another reason than lack of room."""
        return nullcontext() if self.curve is None else self.curve.departures.removing()

    def pinned(self, namespace: str, sizes: Mapping[bytes, int]) -> None:
        """An operator pinned blocks of these keys, which take so many bytes."""
        self.catch_up()
        if self.curve is not None:
            with self._ends_following():
                names = self._names(namespace, [*sizes]).tolist()
                self.curve.pinned(dict(zip(names, sizes.values(), strict=True)))

    def unpinned(self, namespace: str, keys: Sequence[bytes]) -> None:
        self.catch_up()
        if self.curve is not None:
            with self._ends_following():
                self.curve.unpinned(self._names(namespace, keys).tolist())

    def cleared(self, namespace: str | None) -> None:
        """All blocks of a namespace, or of all, were removed."""
        self.catch_up()
        if self.curve is not None:
            with self._ends_following():
                self.curve.cleared(namespace)

    # ── the answer ───────────────────────────────────────────────────────────────────────

    @property
    def num_bytes(self) -> int:
        """Memory that the models take, about."""
        return 0 if self.curve is None else self.curve.num_bytes

    def what_if(self, *, by_namespace: bool) -> WhatIf | None:
        """What other sizes of the tiers would find; None after a failure."""
        self.catch_up()
        return None if self.curve is None else self.curve.report(by_namespace=by_namespace)

    # ── helpers ──────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _ends_following(self) -> Iterator[None]:
        """An exception within ends the following, and nothing else."""
        try:
            yield
        except Exception:  # of models, whatever it is: no request may fail of it
            self.curve = None
            log.exception("what other sizes would find is not known until the next start")

    def _prompt(
        self, namespace: str, keys: Sequence[bytes], stretch: Stretch, block_bytes: int
    ) -> Steps[Prompt]:
        if self._rooms is not None and self.curve is not None:
            # The first size of blocks decides: few servers hold several that differ by much.
            self.curve.fit(self._rooms(block_bytes), block_bytes)
            self._rooms = None
        names: list[Names] = []
        for part in parts(keys, HASHED_PER_STEP):
            if names:
                yield
            names.append(self._names(namespace, part))
        return Prompt(namespace, keys, np.concatenate(names), stretch.tokens or 1, block_bytes)

    def _names(self, namespace: str, keys: Sequence[bytes]) -> Names:
        hashes = map(xxhash.xxh3_64_intdigest, keys, repeat(self._salt(namespace)))
        return np.fromiter(hashes, np.uint64, len(keys))

    def _salt(self, namespace: str) -> int:
        """So that equal keys of two namespaces have different names."""
        salt = self._salts.get(namespace)
        if salt is None:
            if len(self._salts) >= MAX_SALTS:
                self._salts.clear()
            salt = xxhash.xxh3_64_intdigest(namespace.encode(), self._seed)
            self._salts[namespace] = salt
        return salt

    def _learned(self, namespace: str, keys: Sequence[bytes]) -> Learned | None:
        """What the learner made of the request, if there is one."""
        if self._learner is None:
            return None
        path = self._learner.paths.of(namespace, keys[-1])
        return Learned(BY_USES, 0) if path is None else Learned(path.kinds, path.number)

    def _is_again(
        self, namespace: str, keys: Sequence[bytes], learned: Learned | None, now: float,
        is_prompt: bool,
    ) -> bool:  # fmt: skip
        """Whether this is another lookup of the same request, as the learner decides, or without
        one if it comes soon and is of a part of the prompt; of keys without chain fields, which
        are no prompt that is known, if it is of no more keys."""
        end, number = (namespace, keys[-1]), 0 if learned is None else learned.number
        before = self._prompt_ends.pop(end, None)
        self._prompt_ends[end] = now, len(keys), number
        if len(self._prompt_ends) > MOST_ENDS:
            self._prompt_ends.popitem(last=False)
        if before is None:
            return False
        at, length, of_request = before
        if number:
            return number == of_request
        return now - at < AGAIN_S and len(keys) < length + (not is_prompt)


def _stretches(chain: Sequence[Stretch], number: int) -> list[Stretch]:
    """Those of `chain`, and one more of keys that it does not describe; neighbours without fields
    are one."""
    found: list[Stretch] = []
    begin = 0
    for stretch in joined(chain) if len(chain) > 1 else chain:
        if not stretch.tokens and found and not found[-1].tokens:
            found[-1] = found[-1].part(0, found[-1].rows + stretch.rows)
        else:
            found.append(stretch)
        begin += stretch.rows
    if begin < number:
        found.append(Stretch(number - begin, 0, 0, 0))
    return found


def _joined(arrived: Sequence[Arrived]) -> list[Arrived]:
    """Neighbours of which one continues the other as one, such as the messages of a put."""
    found: list[Arrived] = []
    for each in arrived:
        last = found[-1] if found else None
        if (
            last is not None
            and (last.namespace, last.block_bytes) == (each.namespace, each.block_bytes)
            and continues(last.stretch, each.stretch)
        ):
            (stretch,) = joined((last.stretch, each.stretch))
            last.keys.extend(each.keys)
            found[-1] = last._replace(stretch=stretch)
        else:
            found.append(each)
    return found


def _repeats(keys: Sequence[bytes]) -> bool:
    """Whether a key comes twice, as in no prompt."""
    return len({*keys}) < len(keys)
