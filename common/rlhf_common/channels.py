"""gRPC channels and server credentials for both sides: limits, keep-alive, mutual TLS from a folder.

Rule: with a certificate folder both sides need a certificate of the job's own authority. Without a folder the channel
is plain text. TLS never falls back to plain text.
"""

import time
from pathlib import Path
from typing import Final

import grpc

MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
"""Maximum bytes of one message."""

CHUNK_BYTES: Final = 4 * 1024 * 1024
"""Approximate maximum bytes per part of a stream."""

OPTIONS: Final[list[tuple[str, int | str]]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # A restarted peer must be reachable within a second, not after the default back-off of two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]

SERVER_NAME: Final = "rlhf-job"
"""DNS name that clients expect in a server's certificate."""


SETTLE_SECONDS: Final = 0.1
"""Seconds before a server's credentials are replaced, for handshakes that still need the old ones."""
_TRIES: Final = 100
"""Maximum further reads of the files until two in a row agree."""

Files = tuple[bytes, bytes, bytes]


def _read(folder: Path) -> Files:
    """Return authority, certificate and key from the same moment: two reads in a row agree. Raises ValueError if they
    cannot be read, or never agree.
    """
    files = _files(folder)
    for _ in range(_TRIES):
        before, files = files, _files(folder)
        if files == before:
            return files
    raise ValueError(f"certificate folder {folder}: its files change all the time")


def _files(folder: Path) -> Files:
    try:
        return tuple((folder / name).read_bytes() for name in ("ca.crt", "tls.crt", "tls.key"))  # type: ignore[return-value]
    except OSError as error:
        raise ValueError(f"certificate folder {folder}: needs ca.crt, tls.crt, tls.key: {error}") from error


def server_credentials(folder: Path) -> grpc.ServerCredentials:
    """Return the server's side of mutual TLS. New connections use changed files once they can be read and
    SETTLE_SECONDS are over.
    """
    served = _read(folder)

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        """Return the next configuration; None keeps the current one.

        Waits SETTLE_SECONDS before a replacement, for handshakes that still need the old one.
        """
        nonlocal served
        try:
            files = _read(folder)
        except ValueError:
            return None
        if files == served:
            return None
        served = files
        time.sleep(SETTLE_SECONDS)
        return _configuration(files)

    # None is documented to mean "unchanged"; the stubs lack it.
    return grpc.dynamic_ssl_server_credentials(_configuration(served), renewed, require_client_authentication=True)  # type: ignore[arg-type]


def _configuration(files: Files) -> grpc.ServerCertificateConfiguration:
    authority, certificate, key = files
    return grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=authority)


def _client(folder: Path) -> tuple[grpc.ChannelCredentials, list[tuple[str, int | str]]]:
    authority, certificate, key = _read(folder)
    credentials = grpc.ssl_channel_credentials(authority, key, certificate)
    return credentials, [*OPTIONS, ("grpc.ssl_target_name_override", SERVER_NAME)]


def channel(address: str, certificates: Path | None) -> grpc.Channel:
    """Return a blocking channel to a process of the same job; plain text without certificates."""
    if certificates is None:
        return grpc.insecure_channel(address, options=OPTIONS)
    credentials, options = _client(certificates)
    return grpc.secure_channel(address, credentials, options=options)


def aio_channel(address: str, certificates: Path | None) -> grpc.aio.Channel:
    """Return an asyncio channel to a process of the same job; plain text without certificates."""
    if certificates is None:
        return grpc.aio.insecure_channel(address, options=OPTIONS)
    credentials, options = _client(certificates)
    return grpc.aio.secure_channel(address, credentials, options=options)
