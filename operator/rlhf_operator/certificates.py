"""Creates the authority of one job, and issues certificates for its processes (ECDSA P-256).

`Authority` must never be mounted into a pod, where user code runs. Must never read a clock.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from rlhf_common.channels import SERVER_NAME

LIFETIME: Final = timedelta(days=365)
"""Default lifetime of a certificate; long, so that a running job rarely rotates."""
AUTHORITY_LIFETIME: Final = timedelta(days=3650)
"""Default lifetime of an authority."""
CLOCK_SKEW: Final = timedelta(minutes=5)
"""Time before now from which a certificate is valid, because nodes' clocks differ."""
ROTATE_BEFORE: Final = 1 / 3
"""Share of the lifetime that is left when a certificate is rotated; with LIFETIME, four months for failed attempts."""


@dataclass(frozen=True)
class Certificates:
    """The certificate files of a process of the job, as PEM."""

    authority: bytes
    certificate: bytes
    key: bytes

    @property
    def expires(self) -> datetime:
        """Return the end of the certificate's validity in UTC."""
        return x509.load_pem_x509_certificate(self.certificate).not_valid_after_utc

    def check(self) -> None:
        """Raise ValueError unless all three are readable and the key belongs to the certificate."""
        x509.load_pem_x509_certificate(self.authority)
        _check_pair(self.certificate, self.key)

    def data(self) -> dict[str, bytes]:
        """Return file name -> content, with the names that `channels` reads and that the job's Secret has."""
        return {"ca.crt": self.authority, "tls.crt": self.certificate, "tls.key": self.key}

    def write(self, folder: Path) -> None:
        """Write the three files (0600) into `folder` (0700), each atomically, so that no reader sees half a key."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        for name, content in self.data().items():
            partial = folder / f".{name}.tmp"
            partial.unlink(missing_ok=True)
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(content)
            partial.replace(folder / name)


@dataclass(frozen=True)
class Authority:
    """The job's certificate authority as PEM, including the private key."""

    certificate: bytes
    key: bytes

    def check(self, now: datetime) -> None:
        """Raise ValueError unless it can issue certificates at this time."""
        _check_pair(self.certificate, self.key)
        end = x509.load_pem_x509_certificate(self.certificate).not_valid_after_utc
        if end <= now:
            raise ValueError(f"it expired on {end:%Y-%m-%d}")

    def issue(self, names: Sequence[str], now: datetime, lifetime: timedelta = LIFETIME) -> Certificates:
        """Issue a server and client certificate for SERVER_NAME and `names` (DNS names or IP addresses).

        It expires after `lifetime`, or with the authority if that is earlier.
        """
        authority = x509.load_pem_x509_certificate(self.certificate)
        authority_key = serialization.load_pem_private_key(self.key, password=None)
        assert isinstance(authority_key, ec.EllipticCurvePrivateKey)
        key = ec.generate_private_key(ec.SECP256R1())
        lifetime = min(lifetime, authority.not_valid_after_utc - now)
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        certificate = (
            _builder(SERVER_NAME, authority.subject, key.public_key(), now, lifetime)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(usage, critical=False)
            .add_extension(x509.SubjectAlternativeName([_name(n) for n in (SERVER_NAME, *names)]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
            )
            .sign(authority_key, hashes.SHA256())
        )
        return Certificates(self.certificate, certificate.public_bytes(serialization.Encoding.PEM), _pem(key))


def new_authority(job: str, now: datetime, lifetime: timedelta = AUTHORITY_LIFETIME) -> Authority:
    """Create an authority for one job; it can sign certificates of processes but no further authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _common_name(f"{job} authority"[:64])
    certificate = (
        _builder(f"{job} authority"[:64], subject, key.public_key(), now, lifetime)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Authority(certificate.public_bytes(serialization.Encoding.PEM), _pem(key))


def due(certificates: Certificates) -> datetime:
    """Return the time when a third of the certificate's lifetime is left."""
    certificate = x509.load_pem_x509_certificate(certificates.certificate)
    lifetime = certificate.not_valid_after_utc - (certificate.not_valid_before_utc + CLOCK_SKEW)
    return certificate.not_valid_after_utc - lifetime * ROTATE_BEFORE


def _check_pair(certificate: bytes, key: bytes) -> None:
    """Raise ValueError unless `key` is the readable private key (elliptic curve) of the readable certificate."""
    public = x509.load_pem_x509_certificate(certificate).public_key()
    try:
        private = serialization.load_pem_private_key(key, password=None)
    except (TypeError, UnsupportedAlgorithm) as error:
        raise ValueError(f"the key cannot be used: {error}") from error
    if not isinstance(private, ec.EllipticCurvePrivateKey) or private.public_key() != public:
        raise ValueError("the key does not belong to the certificate")


def _name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    name: str, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, now: datetime, lifetime: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_common_name(name))
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + lifetime)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
