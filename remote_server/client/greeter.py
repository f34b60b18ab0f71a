"""Says hello for every namespace that needs it, and tells the session how it went."""

from collections.abc import Callable
from functools import partial

from remote_server import protocol
from remote_server.client import requests
from remote_server.client.control import ControlLane
from remote_server.client.declarations import Declaration
from remote_server.client.results import ClientConfig
from remote_server.client.session import Session
from remote_server.errors import DeadlineExceeded, KVFerryError, RequestRefused


class Greeter:
    """Joins the session, which knows what is due, and the control lane, which can send it."""

    def __init__(
        self,
        config: ClientConfig,
        session: Session,
        control: ControlLane,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._session = session
        self._control = control
        self._clock = clock

    def say_hello(self, now: float) -> None:
        """Send the hellos that are due."""
        for declaration in self._session.due(now):
            self._session.asked(declaration)
            end = partial(self._ended, declaration)
            ask = requests.hello(
                declaration, self._config.client_name, self._config.hello_timeout_s, end
            )
            ask.deadline = now + ask.timeout_s
            self._control.accept(ask)

    def _ended(
        self, declaration: Declaration, result: list[protocol.Welcome] | KVFerryError
    ) -> None:
        match result:
            case [welcome]:
                self._session.welcomed(declaration, welcome)
            case RequestRefused():
                self._session.not_welcomed(declaration, result, self._clock())
            case DeadlineExceeded():
                self._session.probe_failed(declaration, self._clock())
            case _:
                self._session.hello_ended(declaration)
