"""The news of a store, block by block."""

from collections.abc import Iterator

from remote_server.store.presence import Presence, hash_of


def told_by(presence: Presence) -> Iterator[tuple[tuple[str, bytes], bool]]:
    """The namespace and key of each block, and whether it has come."""
    for news in presence.take():
        assert news.keys and news.hashes == [hash_of(key) for key in news.keys]
        for key in news.keys:
            assert news.group == int.from_bytes(key[-4:], "big")
            yield (news.namespace, key), news.has_come
