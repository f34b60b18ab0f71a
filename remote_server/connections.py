"""How many peers are connected: a ROUTER does not say, its monitor does."""

import struct

import zmq

_EVENT = struct.Struct("=hi")


class Connections:
    """Counts the TCP connections of a ROUTER, from being accepted to being closed.

    A client has several. Events are read on the loop thread, when `wakeup` is readable; there are
    a few for each connection and none for a message.
    """

    def __init__(self, router: "zmq.Socket[bytes]") -> None:
        self.opened = 0
        self._open: set[int] = set()
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        self.wakeup = router.get_monitor_socket(events)
        self._router = router

    def __len__(self) -> int:
        return len(self._open)

    def read_events(self) -> None:
        """Take what has happened since the last call."""
        while int(self.wakeup.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event, descriptor = _EVENT.unpack(self.wakeup.recv_multipart(zmq.NOBLOCK)[0])
            if event == zmq.EVENT_ACCEPTED:
                self._open.add(descriptor)
                self.opened += 1
            else:  # a descriptor is used again, so a missed end is made good by the next beginning
                self._open.discard(descriptor)

    def close(self) -> None:
        self._router.disable_monitor()
        self.wakeup.close(linger=0)  # or ending the context would wait for it
