"""Exit statuses of the commands, by the reaction of a script.

0   yes, done, healthy
1   no: a check failed, or nothing was found
2   wrong usage: an invalid flag, setting or file
3   no server answered
"""

from remote_server.errors import ConfigError, KVFerryError

YES, NO, WRONG_USAGE, NO_SERVER = range(4)
INTERRUPTED = 130


class NoServer(KVFerryError):
    """No server answered at the address."""


def status_of(error: KVFerryError) -> int:
    """The exit status of a command that ends with `error`."""
    if isinstance(error, NoServer):
        return NO_SERVER
    return WRONG_USAGE if isinstance(error, ConfigError) else NO
