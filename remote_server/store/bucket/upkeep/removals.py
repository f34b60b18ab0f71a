"""Removal of objects by this server: single packs, and all packs of a namespace."""

from collections import Counter
from collections.abc import Callable
from functools import partial

from remote_server.store.bucket.objects.context import BucketContext
from remote_server.store.bucket.objects.objects import BucketError, Failure, Objects
from remote_server.store.bucket.packs.layout import seal_of
from remote_server.store.bucket.packs.object_names import object_name, prefix_of
from remote_server.store.io_threads import Priority
from remote_server.store.pages import PAGE

Result = Failure | None


class Removals:
    """The removals under way of one tenant. One thread."""

    def __init__(self, context: BucketContext) -> None:
        self._context = context
        self._removing: Counter[tuple[str, bytes]] = Counter()
        self._num_clears = 0
        self._clear_failed = False
        self._when_gone: list[Callable[[bool], None]] = []

    def has(self, namespace: str, key: bytes) -> bool:
        """Whether the pack that `key` names is being removed."""
        return (namespace, key) in self._removing

    def remove(self, namespace: str, key: bytes, seal: int | None = None) -> None:
        """Remove the pack that `key` names; with `seal` only the one whose header has it."""
        self._removing[namespace, key] += 1
        name = object_name(self._context.tenant, namespace, key)
        work = partial(_remove_one, self._context.objects, name, seal)
        finish = partial(self._removed, namespace, key)
        self._context.call(Priority.WRITE, lambda: [work()], finish)

    def _removed(self, namespace: str, key: bytes, result: list[Result] | None) -> None:
        self._removing[namespace, key] -= 1
        if not self._removing[namespace, key]:
            del self._removing[namespace, key]
        self._check(result)

    def clear(self, namespace: str | None) -> None:
        """Remove all packs of one namespace, or of the tenant."""
        prefix = prefix_of(self._context.tenant, namespace)
        self._num_clears += 1
        work = partial(_remove_all, self._context.objects, prefix)
        self._context.call(Priority.WRITE, lambda: [work()], self._cleared)

    def _cleared(self, result: list[Result] | None) -> None:
        self._num_clears -= 1
        self._clear_failed |= not self._check(result)
        self._report()

    def _check(self, result: list[Result] | None) -> bool:
        """Whether a job went well; None stands for one that raised."""
        failure = Failure.OTHER if result is None else result[0]
        if failure is not None:
            self._context.failed(failure)
        return failure is None

    def when_gone(self, then: Callable[[bool], None]) -> None:
        """Call `then`, now or later, when no clear is under way; with False when one failed."""
        self._when_gone.append(then)
        self._report()

    @property
    def is_awaited(self) -> bool:
        """Whether a caller waits for `when_gone`."""
        return bool(self._when_gone)

    @property
    def under_way(self) -> bool:
        """Whether an object is being removed."""
        return bool(self._removing or self._num_clears)

    def _report(self) -> None:
        if self._num_clears:
            return
        waiting, self._when_gone = self._when_gone, []
        good, self._clear_failed = not self._clear_failed, False
        for then in waiting:
            then(good)


def _remove_one(objects: Objects, name: str, seal: int | None) -> Result:
    try:
        if seal is None or _has_seal(objects, name, seal):
            objects.remove([name])
    except BucketError as error:
        return error.failure
    return None


def _has_seal(objects: Objects, name: str, seal: int) -> bool:
    """Whether the object is still the pack whose header has `seal`, or a rest of it: another server
    may have written another pack of the same name since."""
    try:
        data = objects.read_head(name, PAGE).data
    except BucketError as error:
        if error.failure in (Failure.ABSENT, Failure.SHORT):
            return error.failure is Failure.SHORT
        raise
    return data.nbytes < PAGE or seal_of(data) == seal


def _remove_all(objects: Objects, prefix: str) -> Result:
    """Remove all objects below `prefix`."""
    try:
        for listed in objects.listing(prefix):
            objects.remove([each.name for each in listed])
    except BucketError as error:
        return error.failure
    return None
