"""Nothing of ours may raise into the engine: an exception in a hook ends the engine core."""

import functools
import logging
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

logger = logging.getLogger("vllm.kvferry.guard")

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Guarded(Protocol):
    """Something that counts the exceptions that were kept from the engine."""

    def count_hook_error(self, hook: str) -> None: ...


Owner = TypeVar("Owner", bound=Guarded)
Hook = Callable[Concatenate[Owner, Arguments], Result]


def never_raises(
    fallback: Callable[[], Result],
) -> Callable[[Hook[Owner, Arguments, Result]], Hook[Owner, Arguments, Result]]:
    """Wrap a hook so that a bug in it costs a miss, a log line and a count, not the engine.

    The broad `except` is the point: what the engine does not need must not be able to stop it.
    `fallback()` is what the engine gets instead.
    """

    def wrap(hook: Hook[Owner, Arguments, Result]) -> Hook[Owner, Arguments, Result]:
        @functools.wraps(hook)
        def guarded(self: Owner, /, *args: Any, **kwargs: Any) -> Result:
            try:
                return hook(self, *args, **kwargs)
            except Exception:
                logger.exception("%s failed; going on without it", hook.__name__)
                self.count_hook_error(hook.__name__)
                return fallback()

        return guarded

    return wrap
