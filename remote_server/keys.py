"""Files of an operator: keys for CURVE, and how any small file is read.

Keys identify servers and clients. Three kinds of files are TOML. The server's pair and each
client's pair are secret and must be readable by their owner alone; the tenants file
(`server/config.py`) holds public keys only. The fourth one is the server's certificate for lanes
with its private key, in PEM, and secret as well.

A setting may name anything by mistake: a directory, an endless device, a pipe without a writer.
None of them may hang the process, fill its memory or end it in a traceback.
"""

import os
import re
import stat
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85

from remote_server.certificate import Certificate, make_certificate, parse_certificate
from remote_server.errors import ConfigError

# A tenants file with 64 tenants of a hundred keys each has 300 KB.
MAX_FILE_BYTES = 1 << 20


class SmallFile(NamedTuple):
    """Content of a file, and its mode and owner at that moment."""

    data: bytes
    status: os.stat_result


def read_small(path: str, setting: str) -> SmallFile:
    """The file at `path`. Raises `ConfigError` with `setting` and the path when it cannot be read,
    is no regular file or has more than `MAX_FILE_BYTES`. Never waits for a writer."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # a zero byte in the path
        raise ConfigError(f"{setting}: cannot read {path!r}: {error}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{setting}: {path} is {_kind(status.st_mode)}, not a regular file")
        with open(fd, "rb", closefd=False) as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path}: {error.strerror}") from error
    finally:
        os.close(fd)
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{setting}: {path} has more than {MAX_FILE_BYTES} bytes")
    return SmallFile(data, status)


def toml_of(data: bytes, path: str, setting: str) -> dict[str, Any]:
    """`data` as TOML. Raises `ConfigError` with `setting`, the path and the defect."""
    try:
        return tomllib.loads(data.decode("utf-8-sig"))  # some editors write a BOM
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{setting}: {path} is not TOML: byte {error.start} is not UTF-8"
        ) from None
    except RecursionError:
        raise ConfigError(f"{setting}: {path} is not TOML: it is nested too deep") from None
    except ValueError as error:  # TOMLDecodeError, or a number that Python does not convert
        raise ConfigError(f"{setting}: {path} is not TOML: {error}") from error


def one_word(data: bytes, file: str, setting: str) -> bytes:
    """`data`, of `file`, without whitespace around it. Raises `ConfigError` when it has several
    words. The error never shows it, because it may be a key file, named by mistake."""
    word = data.strip()
    if not word.isascii() or len(word.split()) > 1:
        raise ConfigError(f"{setting}: {file}: a token is one word of ASCII characters")
    return word


def _kind(mode: int) -> str:
    kinds = {
        stat.S_ISDIR: "a directory", stat.S_ISCHR: "a device", stat.S_ISBLK: "a device",
        stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket",
    }  # fmt: skip
    return next((name for is_it, name in kinds.items() if is_it(mode)), "something else")


KEY_CHARS = 40  # 32 bytes in Z85, as ZeroMQ writes them

# Largest overhead of CURVE per frame; libzmq's limit applies to the wrapped frame.
CURVE_FRAME_BYTES = 64

SERVER_FILE = "server.key"
CERTIFICATE_ENDING = ".pem"
TENANTS_FILE = "tenants.toml"

TENANT_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
"""The name of a table in the tenants file and of a directory on the disk."""


class ServerKeys(NamedTuple):
    """A server's pair, in Z85."""

    public: bytes
    secret: bytes


class ClientKeys(NamedTuple):
    """A client's pair, and the public key of the server that it trusts, in Z85."""

    server: bytes
    public: bytes
    secret: bytes


# ── reading ──────────────────────────────────────────────────────────────────────────────


def read_server_keys(path: str) -> ServerKeys:
    """Raises `ConfigError` naming the file: missing, readable by others, or not a pair."""
    entries = _read_pair(path, "keys", ("public_key", "secret_key"))
    return ServerKeys(entries["public_key"], entries["secret_key"])


def read_client_keys(path: str) -> ClientKeys:
    """Raises `ConfigError` naming the file: missing, readable by others, or not complete."""
    entries = _read_pair(path, "keys", ("server_key", "public_key", "secret_key"))
    return ClientKeys(entries["server_key"], entries["public_key"], entries["secret_key"])


def certificate_path(keys: str) -> str:
    """The file of the certificate for lanes. It is beside the server's keys."""
    return str(Path(keys).with_suffix(CERTIFICATE_ENDING))


def read_certificate(path: str) -> Certificate | None:
    """The certificate in `path`; none if there is no such file. Raises `ConfigError`, also when
    others can read the file."""
    if not os.path.lexists(path):
        return None
    return parse_certificate(_read_secret(path, "keys").decode(errors="replace"), path)


def check_public_key(key: object) -> str:
    """`key`, if it is one. Raises `ConfigError` with the defect, but without the file."""
    if not isinstance(key, str) or len(key) != KEY_CHARS or not key.isascii():
        raise ConfigError(f"{key!r} is not a key of {KEY_CHARS} characters")
    try:
        if len(z85.decode(key.encode())) == 32:
            return key
    except (KeyError, ValueError, OverflowError):
        pass
    raise ConfigError(f"{key!r} is not a key: it has characters that no key has")


def read_toml(path: str, setting: str, forbidden_mode: int, advice: str) -> dict[str, Any]:
    """The content of a small file of ours. Raises `ConfigError`, also when its mode has any bit of
    `forbidden_mode`, or its owner is neither this user nor root."""
    return toml_of(_read_ours(path, setting, forbidden_mode, advice), path, setting)


def _read_secret(path: str, setting: str) -> bytes:
    advice = f"others could read the secret in it: chmod 600 {path}"
    return _read_ours(path, setting, 0o077, advice)


def _read_ours(path: str, setting: str, forbidden_mode: int, advice: str) -> bytes:
    # The mode is that of the opened file, not of one that was there a moment before.
    data, status = read_small(path, setting)
    if stat.S_IMODE(status.st_mode) & forbidden_mode:
        raise ConfigError(
            f"{setting}: {path} has mode {stat.S_IMODE(status.st_mode):04o}; {advice}"
        )
    if status.st_uid not in (os.getuid(), 0):
        raise ConfigError(f"{setting}: {path} belongs to user {status.st_uid}, not to us")
    return data


def _read_pair(path: str, setting: str, names: Sequence[str]) -> dict[str, bytes]:
    entries = toml_of(_read_secret(path, setting), path, setting)
    missing = [name for name in names if name not in entries]
    if missing:
        raise ConfigError(f"{setting}: {path} has no {missing[0]}; is it another kind of key file?")
    if len(entries) > len(names):
        raise ConfigError(f"{setting}: {path} has more than {', '.join(names)}")
    for name in names:
        try:
            check_public_key(entries[name])
        except ConfigError:
            # Without the error's text, which quotes what may be a secret.
            raise ConfigError(f"{setting}: {path}: {name} is not a key") from None
    pair = {name: entries[name].encode() for name in names}
    if zmq.curve_public(pair["secret_key"]) != pair["public_key"]:
        raise ConfigError(f"{setting}: {path}: public_key and secret_key are not a pair")
    return pair


# ── making ───────────────────────────────────────────────────────────────────────────────


def make_keys(
    folder: Path, tenants: Sequence[str], suffix: str = "", shares: str = ""
) -> list[str]:
    """Make the missing files for `tenants` in `folder`: the server's pair, its certificate and a
    tenants file, once, and a client's pair for each tenant. Returns lines for people: which file
    goes where. Without OpenSSL 3 there is no certificate, and a line about it.

    Overwrites no file: raises `ConfigError` before any is made when a client's file exists.
    `suffix` makes another pair for the same tenant. `shares` are lines of TOML for each tenant in
    the tenants file.
    """
    for name in (*tenants, *([suffix] if suffix else [])):
        if not TENANT_NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} cannot name a tenant: use up to 64 of a-z, 0-9, - and _, a letter or "
                "digit first"
            )
    ending = f"-{suffix}.key" if suffix else ".key"
    clients = {name: folder / f"client-{name}{ending}" for name in dict.fromkeys(tenants)}
    for path in clients.values():
        if os.path.lexists(path):
            raise ConfigError(f"{path} exists and is not overwritten: choose another --suffix")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _make(folder, clients, shares)
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: {error.strerror}") from error


def _make(folder: Path, clients: dict[str, Path], shares: str) -> list[str]:
    server_file, tenants_file = folder / SERVER_FILE, folder / TENANTS_FILE
    if not os.path.lexists(server_file):
        public, secret = zmq.curve_keypair()
        write_new(
            server_file,
            "# The server's pair. Secret: it stays on the server, readable by its user alone.\n"
            f'public_key = "{public.decode()}"\nsecret_key = "{secret.decode()}"\n',
        )
    server = read_server_keys(str(server_file))
    entries = []
    for name, path in clients.items():
        public, secret = zmq.curve_keypair()
        write_new(
            path,
            f"# A pair of tenant {name}. Secret: it goes to its engines' hosts, and nowhere else.\n"
            f'server_key = "{server.public.decode()}"\n'
            f'public_key = "{public.decode()}"\nsecret_key = "{secret.decode()}"\n',
        )
        entries.append(f'[{name}]\nkeys = ["{public.decode()}"]\n{shares}')
    lines = [
        f"{server_file}  the server's, secret: --keys {server_file} --tenants {tenants_file}",
        *_make_certificate(certificate_path(str(server_file))),
        *(f"{path}  secret, for the engines of {name}: \"server\": \"tcp://HOST:5757?keys={path}\""
          for name, path in clients.items()),
    ]  # fmt: skip
    if not entries:
        return lines
    if not os.path.lexists(tenants_file):
        write_new(tenants_file, _TENANTS_HEAD + "\n".join(entries))
        return [*lines, f"{tenants_file}  permitted clients; add quotas and namespaces here"]
    return [*lines, f"put this into {tenants_file}, or its key beside those of its tenant:",
            *"\n".join(entries).splitlines()]  # fmt: skip


def _make_certificate(path: str) -> list[str]:
    """Unless it is there."""
    if read_certificate(path) is None:
        try:
            text = make_certificate()
        except ConfigError as error:
            return [f"{error}; blocks go through ZeroMQ, encrypted and more slowly"]
        write_new(Path(path), text)
    return [f"{path}  the server's, secret: encrypts its lanes, stays beside its keys"]


_TENANTS_HEAD = """\
# Permitted clients and their shares. One table for each tenant:
#   keys = [...]              public keys; two while one replaces the other
#   memory = "4GiB"           its part of --memory; without it, an equal part of the rest
#   disk = "64GiB"            its part of --disk-bytes; without it, none
#   namespaces = ["team-a"]   required prefixes of its namespaces; without it, any
#   namespace_memory = "1GiB" the most of its memory for one namespace
#   ttl_s = 86400             blocks older than this are gone; without it, --ttl-s

"""


def write_new(path: Path, text: str) -> None:
    """Write a file that must not exist yet, readable by its owner alone from the start."""
    with open(create_new(path), "w", encoding="utf-8") as file:
        file.write(text)


def create_new(path: Path) -> int:
    """The descriptor of a file that must not exist yet, readable by its owner alone from the
    start."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o600)
