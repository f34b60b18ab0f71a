"""kvferry's vLLM side: its entry point, and the guards that keep its exceptions from the engine.

vLLM calls `register` through the `vllm.general_plugins` entry point in the front end, the engine
core and the workers, in some processes more than once, even if kvferry is not used. So this module
imports nothing of vLLM before that call, and the connector only when an operator names it.

An exception that reaches the engine core ends it. So every hook of ours is guarded.
"""

import functools
import logging
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

__version__ = "0.2.0"

# The vLLM release lines that the test suite runs against.
TESTED_VLLM = ("0.31", "0.32", "0.33")

CONNECTOR = "KVFerryConnector"


@functools.cache
def register() -> None:
    """Make `"kv_connector": "KVFerryConnector"` work without a module path. Idempotent.

    Never raises: an exception would end a vLLM that does not use kvferry. The name is registered
    in every version of vLLM. The connector refuses an unsupported vLLM with a better message than
    vLLM's for an unknown name.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        with suppress(ValueError):  # registered already
            KVConnectorFactory.register_connector(CONNECTOR, "kv_connector.connector", CONNECTOR)
    except Exception as error:
        logging.getLogger("vllm.kvferry.plugin").warning(
            "%s is not registered: kvferry supports vLLM %s, and here %s",
            CONNECTOR,
            ", ".join(TESTED_VLLM),
            error,
        )


logger = logging.getLogger("vllm.kvferry.guard")

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Fallback = TypeVar("Fallback")


class Guarded(Protocol):
    """Owner of hooks; counts the exceptions that were kept from the engine."""

    def count_hook_error(self, hook: str) -> None: ...


Owner = TypeVar("Owner", bound=Guarded)
Hook = Callable[Concatenate[Owner, Arguments], Result]

# Failed hooks of each owner that were logged: vLLM calls some thousands of times a step.
_logged: "weakref.WeakKeyDictionary[Any, set[str]]" = weakref.WeakKeyDictionary()


def kept_from_engine(owner: Guarded, hook: str) -> None:
    """Call in an `except` block: count the exception, and log it with its traceback the first time
    that `hook` of `owner` fails. Never raises."""
    logged = _logged.setdefault(owner, set())
    first = hook not in logged
    logged.add(hook)
    if first:
        logger.exception("%s failed; going on without it (logged once)", hook)
    try:
        owner.count_hook_error(hook)
    except Exception:  # the counters may be what is broken
        if first:
            logger.exception("%s failed and could not be counted", hook)


class guarded:  # noqa: N801 - used as a statement: `with guarded(self, "a name"):`
    """A part of a hook: an exception ends the part, is counted under its name and logged once."""

    def __init__(self, owner: Guarded, part: str) -> None:
        self._owner = owner
        self._part = part

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if not isinstance(error, Exception):
            return False
        kept_from_engine(self._owner, self._part)
        return True


def never_raises(
    fallback: Callable[[], Fallback], *, but: type[Exception] | tuple[()] = ()
) -> Callable[[Hook[Owner, Arguments, Result]], Hook[Owner, Arguments, Result | Fallback]]:
    """Wrap a hook so that a bug in it costs a miss, a log line and a count, not the engine.

    The broad `except` is deliberate: the engine works without kvferry. On an exception the hook
    returns `fallback()`. Exceptions of type `but` pass: at start-up an operator's mistake must be
    reported.
    """

    def wrap(
        hook: Hook[Owner, Arguments, Result],
    ) -> Hook[Owner, Arguments, Result | Fallback]:
        @functools.wraps(hook)
        def guarded(self: Owner, /, *args: Any, **kwargs: Any) -> Result | Fallback:
            try:
                return hook(self, *args, **kwargs)
            except but:
                raise
            except Exception:
                kept_from_engine(self, hook.__name__)
                return fallback()

        return guarded

    return wrap
