"""Names that a client gives: which characters they may have."""

from collections.abc import Mapping

from remote_server.errors import RemoteProtocolError
from remote_server.plain_text import forbidden_in, plain
from remote_server.protocol.limits import MAX_FINGERPRINT_BYTES


def check_name(what: str, text: str) -> None:
    """Raise `RemoteProtocolError` when `text` has a character that no name may have: people read
    names in terminals and logs, which such characters control. `what` begins the message."""
    if wrong := forbidden_in(text):
        raise RemoteProtocolError(
            f"{what} {plain(text)!r:.80} has the character {wrong}: control and format characters "
            "and line separators are not allowed"
        )


def check_names(namespace: str, client: str, fingerprint: Mapping[str, str]) -> None:
    """`check_name` for all that a hello names, which must not be too much either."""
    texts = [client, *fingerprint, *fingerprint.values()]
    num_bytes = sum(len(text.encode(errors="surrogatepass")) for text in texts)
    if num_bytes > MAX_FINGERPRINT_BYTES:
        raise RemoteProtocolError(
            f"client and fingerprint have {num_bytes} bytes, at most {MAX_FINGERPRINT_BYTES}"
        )
    check_name("namespace", namespace)
    check_name("client", client)
    for field, value in fingerprint.items():
        check_name("fingerprint field", field)
        check_name(f"fingerprint {field:.40}", value)
