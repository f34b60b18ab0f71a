"""Requests on their way to the I/O thread: none is left behind while that thread sleeps."""

import os
import select

from remote_server.client.requests.mailbox import Call, Mailbox


def nothing() -> None:
    pass


def wakes(mailbox: Mailbox) -> bool:
    return bool(select.select([mailbox.fileno()], [], [], 0)[0])


def test_who_submits_while_the_mailbox_is_emptied_does_not_silence_those_who_come_later(
    monkeypatch,
):
    mailbox = Mailbox()
    mailbox.submit(Call(nothing))
    read = os.eventfd_read

    def read_after_somebody_submitted(bell: int) -> int:
        monkeypatch.undo()
        mailbox.submit(Call(nothing))
        return read(bell)

    monkeypatch.setattr(os, "eventfd_read", read_after_somebody_submitted)
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


def test_a_closed_mailbox_rings_nobody_elses_bell():
    mailbox = Mailbox()
    bell = mailbox.fileno()
    mailbox.close()
    successor = os.eventfd(0, os.EFD_NONBLOCK)
    assert successor == bell, "the number is in use again"
    mailbox.wake()
    mailbox.submit(Call(nothing))
    assert not select.select([successor], [], [], 0)[0]
    os.close(successor)
