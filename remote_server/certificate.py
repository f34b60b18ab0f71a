"""The certificate of encrypted lanes, and how it is made.

It is signed by its own key, and it names nothing: clients learn its SHA-256 from the server, over a
connection that has keys, and accept no other. So it has no host name, and it does not expire.

OpenSSL makes it, by the library that encrypts lanes: who can use a certificate can make one.
"""

import ctypes
import re
import secrets
from base64 import b64decode, encodebytes
from collections.abc import Callable
from contextlib import ExitStack
from hashlib import sha256
from typing import Any, NamedTuple

from remote_server.errors import ConfigError

_CERTIFICATE, _PRIVATE_KEY = "CERTIFICATE", "PRIVATE KEY"
_MOST_BYTES = 64 << 10
_MBSTRING_ASC = 0x1001


class Certificate(NamedTuple):
    """What a server shows, and what proves that it is its own."""

    path: str
    """The file with both, in PEM."""
    certificate: bytes
    """In DER."""
    private_key: bytes
    """PKCS 8, in DER."""

    @property
    def pin(self) -> bytes:
        """What clients compare: the SHA-256 of the certificate."""
        return sha256(self.certificate).digest()


def parse_certificate(text: str, path: str) -> Certificate:
    """The content of a file. Raises `ConfigError`."""
    return Certificate(path, _block(text, _CERTIFICATE, path), _block(text, _PRIVATE_KEY, path))


def _block(text: str, label: str, path: str) -> bytes:
    found = re.findall(rf"-----BEGIN {label}-----([^-]*)-----END {label}-----", text)
    try:
        (block,) = found
        der = b64decode("".join(block.split()), validate=True)
    except ValueError:  # also of another number than one
        der = b""
    if not 0 < len(der) < _MOST_BYTES:
        what = f"{path} has no {label.lower()} of ours"
        raise ConfigError(f"keys: {what}; remove it and make another")
    return der


def make_certificate() -> str:
    """The text of a new file: a private key and a certificate with it. Raises `ConfigError` when
    there is no OpenSSL 3."""
    try:
        certificate, private_key = _make(_Crypto())
    except (OSError, AttributeError) as error:
        raise ConfigError(f"no certificate for encrypted lanes: {error}") from None
    return _pem(_PRIVATE_KEY, private_key) + _pem(_CERTIFICATE, certificate)


def _pem(label: str, der: bytes) -> str:
    return f"-----BEGIN {label}-----\n{encodebytes(der).decode()}-----END {label}-----\n"


class _Crypto:
    """Functions of libcrypto by their names. A pointer or 1 is success of all that are checked."""

    def __init__(self) -> None:
        """Raises `OSError`."""
        self._library = ctypes.CDLL("libcrypto.so.3")

    def get(self, name: str, *arguments: Any) -> int:
        """A pointer. Raises `OSError` for NULL."""
        address: int | None = self._function(name, ctypes.c_void_p)(*arguments)
        if not address:
            raise OSError(f"{name} failed")
        return address

    def do(self, name: str, *arguments: Any) -> int:
        """A number above 0. Raises `OSError` for another one."""
        result: int = self._function(name, ctypes.c_int)(*arguments)
        if result <= 0:
            raise OSError(f"{name} failed")
        return result

    def free(self, name: str) -> Callable[[ctypes.c_void_p], None]:
        return self._function(name, None)  # type: ignore[no-any-return]

    def der(self, name: str, address: int) -> bytes:
        """What `i2d_…` writes."""
        memory = ctypes.create_string_buffer(self.do(name, _pointer(address), None))
        at = ctypes.c_void_p(ctypes.addressof(memory))
        self.do(name, _pointer(address), ctypes.byref(at))
        return memory.raw

    def _function(self, name: str, result: type | None) -> Any:
        function = self._library[name]  # another object at each access
        function.restype = result
        return function


_pointer = ctypes.c_void_p


def _make(crypto: _Crypto) -> tuple[bytes, bytes]:
    """A certificate and its private key, on the curve P-256, in DER."""
    with ExitStack() as stack:

        def owned(address: int, free: str) -> ctypes.c_void_p:
            pointer = _pointer(address)
            stack.callback(crypto.free(free), pointer)
            return pointer

        maker = owned(
            crypto.get("EVP_PKEY_CTX_new_from_name", None, b"EC", None), "EVP_PKEY_CTX_free"
        )
        pair = ctypes.c_void_p()
        crypto.do("EVP_PKEY_keygen_init", maker)
        crypto.do("EVP_PKEY_CTX_set_group_name", maker, b"P-256")
        crypto.do("EVP_PKEY_generate", maker, ctypes.byref(pair))
        stack.callback(crypto.free("EVP_PKEY_free"), pair)
        x509 = owned(crypto.get("X509_new"), "X509_free")
        serial, name = (
            _pointer(crypto.get(f"X509_get_{part}", x509))
            for part in ("serialNumber", "subject_name")
        )
        crypto.do("X509_set_version", x509, ctypes.c_long(2))  # the third one
        crypto.do("ASN1_INTEGER_set_uint64", serial, ctypes.c_uint64(secrets.randbits(63) | 1))
        for end, when in (("Before", b"20000101000000Z"), ("After", b"99991231235959Z")):
            crypto.do(
                "ASN1_TIME_set_string", _pointer(crypto.get(f"X509_getm_not{end}", x509)), when
            )
        crypto.do(
            "X509_NAME_add_entry_by_txt", name, b"CN", _MBSTRING_ASC, b"kvferry lanes", -1, -1, 0
        )
        crypto.do("X509_set_issuer_name", x509, name)
        crypto.do("X509_set_pubkey", x509, pair)
        crypto.do("X509_sign", x509, pair, _pointer(crypto.get("EVP_sha256")))
        pkcs8 = owned(crypto.get("EVP_PKEY2PKCS8", pair), "PKCS8_PRIV_KEY_INFO_free")
        return (
            crypto.der("i2d_X509", x509.value or 0),
            crypto.der("i2d_PKCS8_PRIV_KEY_INFO", pkcs8.value or 0),
        )
