"""The admin token, which requests that change something must carry."""

import hmac
import logging

from remote_server.errors import ConfigError
from remote_server.small_file import read_small

log = logging.getLogger(__name__)

# Fewer could be guessed; `openssl rand -hex 32` makes 64.
MIN_TOKEN_CHARS = 16
MAX_TOKEN_BYTES = 4096


class Token:
    """A secret that never leaves this object: it is compared, and not shown."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def __repr__(self) -> str:
        return "Token(***)"

    def matches(self, header: str) -> bool:
        """Whether an `Authorization` header carries it. The comparison takes constant time."""
        scheme, _, given = header.partition(" ")
        same = hmac.compare_digest(given.strip().encode("utf-8", "replace"), self._secret)
        return same and scheme.lower() == "bearer"


def read_token(file: str) -> Token | None:
    """The token in `file`, without surrounding whitespace; None when no file is named.

    Raises `ConfigError` when it cannot be read or is not a usable token.
    """
    if not file:
        return None
    data, status = read_small(file, "admin_token_file")
    secret = data.strip()
    if not MIN_TOKEN_CHARS <= len(secret) <= MAX_TOKEN_BYTES:
        raise ConfigError(
            f"admin_token_file: {file}: a token has {MIN_TOKEN_CHARS} to {MAX_TOKEN_BYTES} "
            f"characters, this one has {len(secret)}"
        )
    if not secret.isascii() or len(secret.split()) != 1:
        raise ConfigError(f"admin_token_file: {file}: a token is one word of ASCII characters")
    if status.st_mode & 0o007:
        log.warning("admin_token_file: %s can be read by every user of this machine", file)
    return Token(secret)
