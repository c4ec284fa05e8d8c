"""Opens the HTTP endpoint of a worker and explains why an address cannot be bound."""

import errno
import os
import socket

from rlhf_common.endpoint import Endpoint
from rlhf_common.names import Env
from rlhf_workers.settings import SettingsError, split_address


class AddressInUseError(OSError):
    """The address is, or was a moment ago, in use by another process."""


def open_endpoint(address: str) -> Endpoint | None:
    """Return the HTTP endpoint at host:port; None for an empty address. Raises AddressInUseError or SettingsError."""
    if not address:
        return None
    host, port = split_address(Env.METRICS, address)
    try:
        return Endpoint(host, port)
    except OSError as error:
        raise why_not_bound(Env.METRICS, address) from error


def why_not_bound(variable: str, address: str) -> Exception:
    """Return AddressInUseError if the address is or was taken, SettingsError with the reason otherwise."""
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
