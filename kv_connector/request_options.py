"""Options of one request, which come over HTTP in `kv_transfer_params`.

    {"kv_transfer_params": {"kvferry": {"load": false, "store": false, "prefetch": true,
                                        "returns": "yes", "within_s": 300}}}

`load: false` computes the prompt even if it is cached below the engine. `store: false` keeps the
request's blocks out of the CPU pool and the server. `prefetch: true` is for a request of one token
sent ahead of the real one: it loads all blocks of its prompt that the server holds, without
break-even and `patience`. A request with other unreadable options does not use the server: they may
have been an opt-out. A request with a LoRA adapter uses only the CPU pool: vLLM's block hash
identifies adapters by name and path, which do not identify their weights on another host. A request
whose prompt another connector brings, as Nixl does, loads nothing here: it would wait for both.

`returns` and `within_s` are a hint: whether the prompt will be continued or repeated, and how soon.
`returns` is `yes`, `no` or `unknown`, which is as no hint. `within_s` belongs to `yes`, and may be
absent. The server evicts by hints while they prove right ([docs/eviction.md](../docs/eviction.md)).
A hint that cannot be read has no effect.

`kv_transfer_params` comes from the body of a client's request and may have any shape and type.
"""

import logging
import reprlib
from collections.abc import Callable, Mapping
from enum import StrEnum, auto
from functools import cache
from typing import TYPE_CHECKING, Any

from remote_server.protocol import MAX_WITHIN_S, Hint

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvferry.request_options")

OPTIONS_KEY = "kvferry"
"""In a request's `kv_transfer_params`: its options, of any shape and type."""

BYPASS_KEY = "kvferry_bypass"
"""In a request's `kv_transfer_params`: a `Bypass`. Any other value comes from a client."""

PREFETCH_KEY = "kvferry_prefetch"
"""In a request's `kv_transfer_params`: True for a request that prefetches."""

PROMPT_COMES_KEY = "do_remote_prefill"
"""vLLM's key in a request to a decoding engine: its whole prompt was computed elsewhere."""

# vLLM's limits; 0 means none of this request's tokens.
_VLLM_LIMITS: dict[Any, str] = {"load": "max_load_tokens", "store": "max_offload_tokens"}
PREFETCH = "prefetch"
RETURNS, WITHIN = HINT_NAMES = ("returns", "within_s")


class Bypass(StrEnum):
    """Why a request must not use the server. Set only by the connector: JSON cannot encode it."""

    LORA = auto()
    OPTIONS_UNREAD = auto()


def bypass_of(params: object) -> Bypass | None:
    """The connector's reason in a request's `kv_transfer_params`, which may be of any type."""
    reason = params.get(BYPASS_KEY) if isinstance(params, Mapping) else None
    return reason if isinstance(reason, Bypass) else None


def prefetches(params: object) -> bool:
    """Whether a request prefetches its prompt's blocks into the pool."""
    return isinstance(params, Mapping) and params.get(PREFETCH_KEY) is True


def apply_request_options(request: "Request") -> None:
    """Translate the request's options for vLLM and the remote tier, in place.

    `request.kv_transfer_params` is a dict or None afterwards, as vLLM expects it.
    """
    given: object = request.kv_transfer_params
    params: dict[Any, Any] = dict(given) if isinstance(given, Mapping) else {}
    for ours in (BYPASS_KEY, PREFETCH_KEY):
        params.pop(ours, None)
    options = params.get(OPTIONS_KEY) if isinstance(given, Mapping) else given
    translated, unread = _read(options)
    params |= translated
    if unread is not None:
        logger.warning(
            "request %s does not use the server: cannot read %s in kv_transfer_params; known: "
            '{"%s": {"load": ..., "store": ..., "prefetch": ...}}, each true or false, and a hint',
            request.request_id,
            reprlib.repr(unread),  # a client chooses the length of its body
            OPTIONS_KEY,
        )
        params[BYPASS_KEY] = Bypass.OPTIONS_UNREAD
    if params.get(PROMPT_COMES_KEY):
        params[_VLLM_LIMITS["load"]] = 0
    if request.lora_request is not None:
        params[BYPASS_KEY] = Bypass.LORA
    request.kv_transfer_params = params or None


def keep_to_engine(request: "Request") -> None:
    """Let the request use only the engine's own cache."""
    request.kv_transfer_params = {
        **(request.kv_transfer_params or {}),
        **dict.fromkeys(_VLLM_LIMITS.values(), 0),
    }


def keep_to_pool(request: "Request") -> None:
    """Keep the request from the server, because its options could not be read. Parameters for
    other connectors stay."""
    params = request.kv_transfer_params
    others = params if isinstance(params, dict) else {}
    request.kv_transfer_params = {**others, BYPASS_KEY: Bypass.OPTIONS_UNREAD}


def _read(options: object) -> tuple[dict[str, int | bool], object]:
    """The readable `options`, as vLLM's limits and our own key; and the unreadable part, or
    None."""
    if options is None:
        return {}, None
    if not isinstance(options, Mapping):
        return {}, options
    translated: dict[str, int | bool] = {}
    unread: dict[Any, Any] = {}
    for name, wanted in options.items():
        if name in HINT_NAMES:
            continue
        if not isinstance(wanted, bool) or name not in (*_VLLM_LIMITS, PREFETCH):
            unread[name] = wanted
        elif name == PREFETCH:
            translated[PREFETCH_KEY] = wanted
        elif not wanted:
            translated[_VLLM_LIMITS[name]] = 0
    return translated, unread or None


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
