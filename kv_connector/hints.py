"""Hints of requests: whether a prompt will be continued or repeated, and how soon.

    {"kv_transfer_params": {"kvferry": {"returns": "yes", "within_s": 300}}}

`returns` is `yes`, `no` or `unknown`, which is as no hint. `within_s` belongs to `yes`, and may be
absent. The server evicts by hints while they prove right ([docs/eviction.md](../docs/eviction.md)).
They come from the body of a client's request, so one that cannot be read has no effect.
"""

import logging
from collections.abc import Callable, Mapping
from enum import StrEnum, auto
from functools import cache

from remote_server.protocol import MAX_WITHIN_S, Hint

logger = logging.getLogger("vllm.kvferry.hints")

OPTIONS_KEY = "kvferry"
"""In a request's `kv_transfer_params`: its options, of any shape and type."""

RETURNS, WITHIN = HINT_NAMES = ("returns", "within_s")


class BadHint(StrEnum):
    """Why a hint has no effect."""

    RETURNS = auto()
    WITHIN = auto()
    ALONE = auto()


_RULES = {
    BadHint.RETURNS: '`returns` is not "yes", "no" or "unknown"',
    BadHint.WITHIN: "`within_s` is no number of seconds above 0, or `returns` is not yes",
    BadHint.ALONE: "`within_s` is without `returns`",
}


def hint_in(params: object, on_bad: Callable[[BadHint], None] | None = None) -> Hint | None:
    """The hint of a request with these `kv_transfer_params`. `on_bad` is called for one that cannot
    be read, and the first one of each kind is logged then."""
    hint = hint_of(params.get(OPTIONS_KEY)) if isinstance(params, Mapping) else None
    if not isinstance(hint, BadHint):
        return hint
    if on_bad is not None:
        on_bad(hint)
        _log_once(hint)
    return None


@cache
def _log_once(reason: BadHint) -> None:
    logger.warning(
        "a hint in kv_transfer_params has no effect (%s): %s; further ones are only counted",
        reason,
        _RULES[reason],
    )


def hint_of(options: object) -> Hint | BadHint | None:
    """The hint among a request's options, or why it cannot be read; None: there is none."""
    if not isinstance(options, Mapping) or not any(name in options for name in HINT_NAMES):
        return None
    if RETURNS not in options:
        return BadHint.ALONE
    returns, within_s = options[RETURNS], options.get(WITHIN)
    if not isinstance(returns, str) or returns not in ("yes", "no", "unknown"):
        return BadHint.RETURNS
    if within_s is None:
        return None if returns == "unknown" else Hint(returns == "yes")
    if returns != "yes" or not _is_time(within_s):
        return BadHint.WITHIN
    return Hint(True, float(within_s))


def _is_time(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value <= MAX_WITHIN_S
