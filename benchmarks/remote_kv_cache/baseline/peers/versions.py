"""Versions of the peers in a record."""

from benchmarks.harness.commands import peer_folder
from benchmarks.harness.record import Record
from benchmarks.harness.runner import Skipped
from benchmarks.remote_kv_cache.baseline.peers import memcached_work, redis_work


def note(record: Record) -> None:
    """Each program's version, or the reason for which it does not run here."""
    finders = {"redis-server": redis_work.find, "memcached": memcached_work.find}
    for name, find in finders.items():
        try:
            record.versions[name] = peer_folder.version(find())
        except Skipped as reason:
            record.parameters[name] = str(reason)
