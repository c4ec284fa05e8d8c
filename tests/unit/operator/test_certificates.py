"""A job's certificates: their uses, who may read them, and when they are replaced."""

import socket
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from rlhf_common import channels
from rlhf_common.channels import SERVER_NAME, server_credentials
from rlhf_operator.certificates import LIFETIME, due, new_authority

NOW = datetime(2026, 3, 1, tzinfo=UTC)


def test_a_certificate_serves_and_dials_under_the_jobs_name_and_the_given_ones() -> None:
    issued = new_authority("job", NOW).issue(["a.example", "127.0.0.1"], NOW)
    certificate = x509.load_pem_x509_certificate(issued.certificate)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [SERVER_NAME, "a.example"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert {use._name for use in usage} == {"serverAuth", "clientAuth"}
    key = certificate.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert key.curve.name == "secp256r1"
    assert issued.expires == NOW + LIFETIME


def test_only_the_own_authority_signed_it() -> None:
    own, other = new_authority("job", NOW), new_authority("job", NOW)
    certificate = x509.load_pem_x509_certificate(own.issue([], NOW).certificate)
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(own.certificate))
    with pytest.raises(InvalidSignature):
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(other.certificate))


def test_the_key_is_readable_by_its_owner_only_and_never_the_authoritys(tmp_path: Path) -> None:
    authority = new_authority("job", NOW)
    folder = tmp_path / "certificates"
    authority.issue([], NOW).write(folder)
    authority.issue([], NOW).write(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        "ca.crt": 0o600,
        "tls.crt": 0o600,
        "tls.key": 0o600,
    }
    assert all(authority.key not in path.read_bytes() for path in folder.iterdir())


def test_a_certificate_is_due_when_a_third_of_its_life_is_left() -> None:
    issued = new_authority("job", NOW).issue([], NOW)
    assert due(issued) == NOW + LIFETIME * 2 / 3


def test_a_certificate_never_outlives_its_authority() -> None:
    authority = new_authority("job", NOW, timedelta(days=10))
    assert authority.issue([], NOW).expires == NOW + timedelta(days=10)


KEYS = {
    "missing": b"",
    "no PEM": b"\x00\xff",
    "damaged": new_authority("job", NOW).key.replace(b"\nM", b"\n!", 1),
    "of another authority": new_authority("job", NOW).key,
    "no elliptic curve": Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    "encrypted": ec.generate_private_key(ec.SECP256R1()).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
    ),
}


@pytest.mark.parametrize("key", KEYS)
def test_a_damaged_or_foreign_key_fails_the_check(key: str) -> None:
    authority = new_authority("job", NOW)
    authority.check(NOW)
    issued = authority.issue([], NOW)
    issued.check()
    with pytest.raises(ValueError, match=r"key|PEM"):
        replace(authority, key=KEYS[key]).check(NOW)
    with pytest.raises(ValueError, match=r"key|PEM"):
        replace(issued, key=KEYS[key]).check()


def test_a_damaged_certificate_or_an_expired_authority_fails_the_check() -> None:
    authority = new_authority("job", NOW)
    issued = authority.issue([], NOW)
    damaged = authority.certificate[:-60]
    with pytest.raises(ValueError, match="PEM"):
        replace(authority, certificate=damaged).check(NOW)
    for name in ("authority", "certificate"):
        with pytest.raises(ValueError, match="PEM"):
            replace(issued, **{name: damaged}).check()
    with pytest.raises(ValueError, match="expired on 2026-03-11"):
        new_authority("job", NOW, timedelta(days=10)).check(NOW + timedelta(days=10))


def presented(port: int, folder: Path) -> bytes:
    """Return the certificate that the server shows to a process of the job."""
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=30) as plain,
        context.wrap_socket(plain, server_hostname=SERVER_NAME) as secure,
    ):
        result = secure.getpeercert(binary_form=True)
    assert result is not None
    return result


def test_a_server_shows_a_renewed_certificate_without_a_restart(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    authority = new_authority("job", now)
    authority.issue([], now).write(tmp_path)
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", server_credentials(tmp_path))
    server.start()
    try:
        before = presented(port, tmp_path)
        renewed = authority.issue([], now)
        renewed.write(tmp_path)
        after = presented(port, tmp_path)
        assert before != after == ssl.PEM_cert_to_DER_cert(renewed.certificate.decode())
        (tmp_path / "tls.key").unlink()
        context = tmp_path / "again"
        renewed.write(context)
        assert presented(port, context) == after, "what cannot be read leaves the last one in place"
        another = new_authority("job", now).issue([], now)
        another.write(tmp_path)
        assert presented(port, tmp_path) == ssl.PEM_cert_to_DER_cert(another.certificate.decode())
    finally:
        server.stop(None)


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_files_that_are_exchanged_while_they_are_read_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turn: int
) -> None:
    """The kubelet replaces all files at once; a key with another certificate would stop all connections."""
    now = datetime.now(UTC)
    authority = new_authority("job", now)
    authority.issue([], now).write(tmp_path)
    read, renewed = Path.read_bytes, authority.issue([], now)
    reads: list[Path] = []

    def exchanging(path: Path) -> bytes:
        if len(reads) == turn:
            renewed.write(tmp_path)
        reads.append(path)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", exchanging)
    assert channels._read(tmp_path) == (renewed.authority, renewed.certificate, renewed.key)


def test_what_a_server_serves_is_replaced_only_when_the_files_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC crashes if it is replaced during handshakes: within seconds if every connection replaces it."""
    now = datetime.now(UTC)
    authority = new_authority("job", now)
    authority.issue([], now).write(tmp_path)
    fetchers: list[Callable[[], object]] = []
    monkeypatch.setattr(grpc, "dynamic_ssl_server_credentials", lambda first, fetch, **_: fetchers.append(fetch))
    server_credentials(tmp_path)
    (fetch,) = fetchers
    assert fetch() is None
    authority.issue([], now).write(tmp_path)
    assert fetch() is not None
    assert fetch() is None
    (tmp_path / "tls.key").unlink()
    assert fetch() is None, "half a set of files is no reason to change anything"
