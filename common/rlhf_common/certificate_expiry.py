"""Reads a certificate's expiry, `notAfter` of X.509 (RFC 5280, 4.1), from its PEM file.

The result must never decide trust.
"""

import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

_SEQUENCE: Final = 0x30
_VERSION: Final = 0xA0
_FORMS: Final = {0x17: "%y%m%d%H%M%SZ", 0x18: "%Y%m%d%H%M%SZ"}
"""ASN.1 tag of a time -> its format."""
_BEFORE_VALIDITY: Final = 3
"""Number of fields between the version and the validity: serial number, signature algorithm, issuer."""


def expiry_of_file(path: Path) -> float:
    """Return the expiry of the first certificate of a PEM file, in seconds since 1970. Raises OSError and
    ValueError."""
    text = path.read_text(encoding="ascii", errors="replace")
    begin, end = text.find(ssl.PEM_HEADER), text.find(ssl.PEM_FOOTER)
    if begin < 0 or end < begin:
        raise ValueError(f"{path} holds no certificate")
    return not_after(ssl.PEM_cert_to_DER_cert(text[begin : end + len(ssl.PEM_FOOTER)]))


def not_after(certificate: bytes) -> float:
    """Return the expiry of a certificate, in seconds since 1970. Raises ValueError for bytes that are no
    certificate."""
    body = _content(_content(certificate, _SEQUENCE), _SEQUENCE)
    if body[:1] == bytes([_VERSION]):
        body = _rest(body)
    for _ in range(_BEFORE_VALIDITY):
        body = _rest(body)
    end = _rest(_content(body, _SEQUENCE))
    form = _FORMS.get(end[0] if end else 0)
    if form is None:
        raise ValueError("the certificate's validity has no time at its end")
    text = _content(end, end[0]).decode("ascii")
    return datetime.strptime(text, form).replace(tzinfo=UTC).timestamp()


def _header(data: bytes) -> tuple[int, int]:
    """Return (start, end) of the content of the first element. Raises ValueError if the data are shorter than it."""
    if len(data) < 2:
        raise ValueError("the certificate ends too early")
    start, length = 2, data[1]
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(data[2:start], "big")
    if start + length > len(data):
        raise ValueError("the certificate ends too early")
    return start, start + length


def _content(data: bytes, tag: int) -> bytes:
    start, end = _header(data)
    if data[0] != tag:
        raise ValueError(f"the certificate has an element of type {data[0]}, expected is {tag}")
    return data[start:end]


def _rest(data: bytes) -> bytes:
    return data[_header(data)[1] :]
