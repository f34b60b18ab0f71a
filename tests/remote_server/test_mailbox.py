"""Requests on their way to the I/O thread: none is left behind while that thread sleeps."""

import select

from remote_server.client.mailbox import Call, Mailbox


def nothing() -> None:
    pass


class Interrupted:
    """A mailbox's reader, with somebody who submits just before it is read."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._reader = mailbox._reader

    def recv(self, num_bytes: int) -> bytes:
        self._mailbox._reader = self._reader
        self._mailbox.submit(Call(nothing))
        return self._reader.recv(num_bytes)


def wakes(mailbox: Mailbox) -> bool:
    return bool(select.select([mailbox.fileno()], [], [], 0)[0])


def test_who_submits_while_the_mailbox_is_emptied_does_not_silence_those_who_come_later():
    mailbox = Mailbox()
    mailbox.submit(Call(nothing))
    mailbox._reader = Interrupted(mailbox)
    assert len([*mailbox.take()]) == 2
    mailbox.submit(Call(nothing))
    assert wakes(mailbox)
    assert len([*mailbox.take()]) == 1
    assert not wakes(mailbox)
    mailbox.close()


def test_one_wake_is_enough_for_all_who_submit_before_it_is_heard():
    mailbox = Mailbox()
    for _ in range(10_000):
        mailbox.submit(Call(nothing))
    assert wakes(mailbox)
    assert len([*mailbox.take()]) == 10_000
    assert not wakes(mailbox)
    mailbox.close()
