"""Puts: which blocks of a put are worth a slot, and their outcomes."""

from collections import Counter
from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

from remote_server.protocol import Declined, PutOutcome, select
from remote_server.store.memory.slabs import Block, BlockState
from remote_server.store.namespaces import Namespaces
from remote_server.store.stack.tier_stack import TierStack
from remote_server.store.tier import Offered

_TO_WRITE = (PutOutcome.CREATED, PutOutcome.FORCED)


class Reserved(NamedTuple):
    """The slots of a put's blocks. The caller fills each and completes or fails it once."""

    outcomes: bytearray  # one `PutOutcome` per key
    indices: list[int]  # of each of `blocks`, into the keys
    blocks: list[Block]
    reasons: Counter[str]  # of declined keys


class Puts:
    """The puts of a tenant."""

    def __init__(
        self, tier_stack: TierStack, namespaces: Namespaces, counters: Counter[str]
    ) -> None:
        self._memory = tier_stack.memory
        self._tier_stack = tier_stack
        self._namespaces = namespaces
        self._counters = counters

    def begin(
        self,
        offered: Offered[int | None],
        *,
        force: bool,
        declines: Declined | None = None,
        seen: set[bytes] | None = None,
    ) -> Reserved:
        """Reserve a slot for each key worth writing. The namespace must be declared.

        `declines` is why no block is kept, if none is. `seen` has the keys that earlier steps of
        the same put reserved; these keys are added to it.
        """
        namespace, keys, lengths, checksums, chain = offered
        self._tier_stack.expire(namespace, keys)
        all_keys = keys
        states = self._tier_stack.known_states(namespace, keys)
        reasons: Counter[str] = Counter()
        outcomes = bytearray([PutOutcome.CREATED]) * len(keys)
        indices: Sequence[int] = range(len(keys))
        repeated = len(set(keys)) < len(keys) or (seen and not seen.isdisjoint(keys))
        if any(states) or declines or repeated:
            outcomes = _outcomes(keys, states, seen or set(), force=force, declines=declines)
            indices = [index for index, outcome in enumerate(outcomes) if outcome in _TO_WRITE]
            keys = [keys[index] for index in indices]
            lengths = [lengths[index] for index in indices]
            checksums = [checksums[index] for index in indices]
            chain = select(chain, indices)
            if declines and (declined := outcomes.count(PutOutcome.DECLINED)):
                reasons[declines] = declined
        if seen is not None:
            seen.update(all_keys)
        block_bytes = self._namespaces.block_bytes_of(namespace)
        self._tier_stack.arriving(namespace, keys, chain, block_bytes)
        blocks = self._memory.begin_puts(
            Offered(namespace, keys, lengths, checksums, chain), block_bytes,
            may_refuse=not self._tier_stack.below,
        )  # fmt: skip
        self._tier_stack.reserved(namespace, blocks, chain)
        if refused := indices[len(blocks) :]:
            at_quota = self._memory.at_quota(namespace, block_bytes)
            reason = Declined.QUOTA if at_quota else Declined.NO_SLOT
            reasons[Declined.UNLIKELY if self._memory.refused else reason] += len(refused)
            for index in refused:
                outcomes[index] = PutOutcome.DECLINED
            if (follower := self._tier_stack.follower) is not None:
                follower.declined(namespace, [all_keys[index] for index in refused])
        reserved = Reserved(outcomes, [*indices[: len(blocks)]], blocks, reasons)
        self._count_put(reserved)
        if self._tier_stack.below and PutOutcome.EXISTED in outcomes:
            existed = [outcome == PutOutcome.EXISTED for outcome in outcomes]
            self._tier_stack.asked_again(namespace, [*compress(all_keys, existed)])
        return reserved

    def end(
        self,
        reserved: Reserved,
        intact: Sequence[bool] | None,
        reason: Declined = Declined.CHECKSUM,
    ) -> None:
        """Publish the `intact` blocks: one verdict per block, or None for no block.

        The others are discarded for `reason`, and their outcomes in `reserved` become DECLINED.
        Blocks are published from the last to the first, so that the head of a prefix is the most
        recently used.
        """
        good = reserved.blocks
        if reserved.blocks and (intact is None or not all(intact)):
            verdicts = intact if intact is not None else [False] * len(reserved.blocks)
            good = [block for block, ok in zip(reserved.blocks, verdicts, strict=True) if ok]
            for index, block, ok in zip(reserved.indices, reserved.blocks, verdicts, strict=True):
                if not ok:
                    self._memory.fail_put(block)
                    reserved.outcomes[index] = PutOutcome.DECLINED
            reserved.reasons[reason] += len(verdicts) - len(good)
            self._counters[f"put_declined_{reason}"] += len(verdicts) - len(good)
        created_at = self._tier_stack.clock()
        for block in good:
            block.created_at = created_at
        self._memory.complete_puts(good[::-1])
        if self._tier_stack.below:  # without those cleared meanwhile
            self._tier_stack.published([b for b in good if b.state is BlockState.READABLE])
        forced = reserved.outcomes.count(PutOutcome.FORCED)
        self._counters["put_forced"] += forced
        self._counters["put_created"] += len(good) - forced

    def _count_put(self, reserved: Reserved) -> None:
        """Count the outcomes decided so far; `end` counts the others."""
        self._counters["put_total"] += len(reserved.outcomes)
        self._counters["put_existed"] += reserved.outcomes.count(PutOutcome.EXISTED)
        self._counters["put_duplicate"] += reserved.outcomes.count(PutOutcome.DUPLICATE)
        for reason, count in reserved.reasons.items():
            self._counters[f"put_declined_{reason}"] += count


def _outcomes(
    keys: Sequence[bytes],
    states: bytes,
    earlier: set[bytes],
    *,
    force: bool,
    declines: Declined | None,
) -> bytearray:
    """The outcome of each key of a put, if there is room. `earlier` keys came before in it."""
    outcomes = bytearray()
    seen = {key for key in keys if key in earlier}
    for key, state in zip(keys, states, strict=True):
        if key in seen:
            outcome = PutOutcome.DUPLICATE
        elif state and not force:
            outcome = PutOutcome.EXISTED
        elif declines:
            outcome = PutOutcome.DECLINED
        else:
            outcome = PutOutcome.FORCED if state else PutOutcome.CREATED
        seen.add(key)
        outcomes.append(outcome)
    return outcomes
