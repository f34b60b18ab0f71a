"""The ends of calls of the store: what each means for the contents of the bucket."""

import logging

from remote_server.store.bucket.index.contents import Contents, Swept
from remote_server.store.bucket.index.names import Doubts
from remote_server.store.bucket.objects.context import BucketContext
from remote_server.store.bucket.objects.objects import Failure
from remote_server.store.bucket.packs.pack import Pack, PackState, make_pack
from remote_server.store.bucket.transfers.pack_io import ReadHeader
from remote_server.store.bucket.upkeep.removals import Removals
from remote_server.store.tier import Written

log = logging.getLogger(__name__)


class Ends:
    """Updates the contents when a call has ended, and removes packs that are wrong. One thread."""

    def __init__(self, context: BucketContext, contents: Contents, removals: Removals) -> None:
        self._context = context
        self._contents = contents
        self._index, self._names = contents.index, contents.names
        self._removals = removals
        self._doubts = Doubts(context.clock)

    def header_read(self, namespace: str, key: bytes, read: ReadHeader) -> None:
        """The header of the pack that `key` names has come, or not."""
        if read.failure not in (None, Failure.ABSENT):
            if read.failure is Failure.LOST:  # perhaps by this pack: no lookup waits for it soon
                self._names.is_gone(namespace, key)
            self._context.failed(read.failure, (namespace, key))
            return
        self._context.availability.succeeded()
        if read.foreign:
            self._names.cannot_be_read(namespace, key)
        elif read.header is None:
            self._names.is_gone(namespace, key)
            if read.damage:
                log.warning("bucket: a pack of %s is damaged: %s", namespace, read.damage)
                self._is_wrong(namespace, key)
        else:
            self._names.is_there(namespace, key)
            self._contents.clock.saw(read.modified)
            if self._index.pack(namespace, key) is None and not self._removals.has(namespace, key):
                self._index.add(
                    make_pack(read.header, read.modified, PackState.READABLE, read.start)
                )

    def written(self, pack: Pack, made: bool, failure: Failure | None) -> Written:
        """The write of `pack` has ended; not `made`: it was there."""
        if failure is not None:
            self._context.failed(failure, (pack.namespace, pack.key))
            return Written.IO_ERROR
        self._context.availability.succeeded()
        if pack.is_cleared:
            self._removals.remove(pack.namespace, pack.key)
            return Written.CLEARED
        self._contents.is_written(pack)
        if made:  # the rows of another server's may differ in bits: a lookup reads its header
            self._index.add(pack)
        return Written.OK

    def read_failed(self, pack: Pack, failure: Failure | None) -> None:
        """A pack's bytes did not come, or were damaged (no `failure`)."""
        if failure is not None:
            self._context.failed(failure, (pack.namespace, pack.key))
        else:
            self._context.availability.succeeded()
        if failure in (None, Failure.ABSENT, Failure.SHORT):
            self._context.counters["dropped_absent"] += failure is Failure.ABSENT
            self._contents.drop(pack)
            if failure is not Failure.ABSENT:
                self._is_wrong(pack.namespace, pack.key, pack.seal)
        elif pack.state is PackState.READABLE:
            self._index.drop(pack)  # a lookup reads its header again: none promises it meanwhile

    def _is_wrong(self, namespace: str, key: bytes, seal: int | None = None) -> None:
        """The bytes of a pack were wrong, which is a miss. It is asked for again in a minute."""
        if self._doubts.are_confirmed(namespace, key):
            self._removals.remove(namespace, key, seal)

    def renewed(self, pack: Pack, failure: Failure | None) -> None:
        """The renewal of `pack` has ended."""
        if failure is not None:
            self._context.failed(failure, (pack.namespace, pack.key))
        elif not self._names.has(pack.namespace, pack.key):  # removed or cleared meanwhile
            self._removals.remove(pack.namespace, pack.key)

    def swept(self, swept: Swept) -> None:
        """A sweep has ended."""
        if swept.failure is not None:
            self._context.failed(swept.failure)
        else:
            self._contents.swept(swept)
