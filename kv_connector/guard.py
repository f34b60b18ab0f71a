"""Nothing of ours may raise into the engine: an exception in a hook ends the engine core."""

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

logger = logging.getLogger("vllm.kvferry.guard")

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Fallback = TypeVar("Fallback")


class Guarded(Protocol):
    """Something that counts the exceptions that were kept from the engine."""

    def count_hook_error(self, hook: str) -> None: ...


Owner = TypeVar("Owner", bound=Guarded)
Hook = Callable[Concatenate[Owner, Arguments], Result]

# Which hooks of which owner have been logged: vLLM calls some of them thousands of times a step.
_said: "weakref.WeakKeyDictionary[Any, set[str]]" = weakref.WeakKeyDictionary()


def kept_from_engine(owner: Guarded, hook: str) -> None:
    """Call in an `except` block: count what was caught, and log it with its traceback the first
    time that `hook` of `owner` fails. Never raises, whatever `owner` does."""
    said = _said.setdefault(owner, set())
    first = hook not in said
    said.add(hook)
    if first:
        logger.exception("%s failed; going on without it (said once)", hook)
    try:
        owner.count_hook_error(hook)
    except Exception:  # it may be the counters that are broken
        if first:
            logger.exception("%s failed and could not be counted", hook)


def never_raises(
    fallback: Callable[[], Fallback], *, but: type[Exception] | tuple[()] = ()
) -> Callable[[Hook[Owner, Arguments, Result]], Hook[Owner, Arguments, Result | Fallback]]:
    """Wrap a hook so that a bug in it costs a miss, a log line and a count, not the engine.

    The broad `except` is the point: what the engine does not need must not be able to stop it.
    `fallback()` is what the engine gets instead. What is `but` passes: at start-up, an operator's
    mistake must be told.
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
