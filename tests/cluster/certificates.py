"""The cluster's certificate authority, its certificates, and kubeconfigs made from them.

Owns the keys of one instance, in its folder. Certificates are valid for a day. Rule: those of components have the user
and group names that Kubernetes' bootstrap roles expect. Keys never leave the instance's folder, which is readable by
its user alone.
"""

from __future__ import annotations

import base64
import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFETIME = datetime.timedelta(days=1)  # longer than any test run, short enough to be worthless afterwards


class ClusterAuthority:
    """A self-signed authority that issues into `folder`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "rlhf-cluster")])
        builder = _builder(self._name, self._name, self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        builder = builder.add_extension(_key_usage(authority=True), critical=True)
        self.certificate = self._write("ca", builder.sign(self._key, hashes.SHA256()), self._key)[0]
        self.key = folder / "ca.key"
        service_accounts = ec.generate_private_key(ec.SECP256R1())
        self.service_account_key = folder / "service-accounts.key"
        self.service_account_key.write_bytes(_private(service_accounts))

    def issue(self, file: str, user: str, groups: Sequence[str] = (), names: Sequence[str] = ()) -> tuple[Path, Path]:
        """Issue a client certificate for `user` in `groups`; a server certificate when `names` are given."""
        key = ec.generate_private_key(ec.SECP256R1())
        attributes = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
        subject = x509.Name([*attributes, x509.NameAttribute(NameOID.COMMON_NAME, user)])
        builder = _builder(subject, self._name, key.public_key())
        usage = ExtendedKeyUsageOID.SERVER_AUTH if names else ExtendedKeyUsageOID.CLIENT_AUTH
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        builder = builder.add_extension(_key_usage(authority=False), critical=True)
        if names:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False
            )
        return self._write(file, builder.sign(self._key, hashes.SHA256()), key)

    def kubeconfig(self, file: str, server: str, user: str, groups: Sequence[str] = ()) -> Path:
        """Write a self-contained kubeconfig for `user` in `groups`; return its path."""
        certificate, key = self.issue(file, user, groups)
        cluster = {"server": server, "certificate-authority-data": _base64(self.certificate)}
        identity = {"client-certificate-data": _base64(certificate), "client-key-data": _base64(key)}
        path = self.folder / f"{file}.kubeconfig"
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": user, "user": identity}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": user}}],
            "current-context": "test",
        }
        path.write_text(yaml.safe_dump(document))
        path.chmod(0o600)
        return path

    def _write(self, file: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> tuple[Path, Path]:
        paths = self.folder / f"{file}.crt", self.folder / f"{file}.key"
        paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        paths[1].touch(mode=0o600)
        paths[1].write_bytes(_private(key))
        return paths


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    start = now - datetime.timedelta(minutes=5)
    return x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number(), start, now + LIFETIME)


def _key_usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    # SEC 1 form, because the API server reads no PKCS 8 keys for service accounts.
    form = serialization.PrivateFormat.TraditionalOpenSSL
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
