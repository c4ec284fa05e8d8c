"""Addresses that a worker binds: its HTTP endpoint, and why one cannot be had. Imports nothing that is slow to load."""

import errno
import os
import socket

from rlhf_common.endpoint import Endpoint
from rlhf_common.names import Env
from rlhf_workers.settings import SettingsError, split_address


class AddressInUseError(OSError):
    """Another process listens where this one should."""


def open_endpoint(address: str) -> Endpoint | None:
    """The HTTP endpoint at host:port, none for an empty address. AddressInUseError or SettingsError."""
    if not address:
        return None
    host, port = split_address(Env.METRICS, address)
    try:
        return Endpoint(host, port)
    except OSError as error:
        raise why_not_bound(Env.METRICS, address) from error


def why_not_bound(variable: str, address: str) -> Exception:
    """AddressInUseError when the address is taken, SettingsError when it is not this machine's or not allowed."""
    host, port = split_address(variable, address)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family) as probe:
            probe.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return AddressInUseError(f"{variable}={address}: the address is in use by another process")
        return SettingsError(f"{variable}={address}: cannot be bound: {os.strerror(error.errno or 0)}: {error}")
    return AddressInUseError(f"{variable}={address}: the address was in use by another process a moment ago")
