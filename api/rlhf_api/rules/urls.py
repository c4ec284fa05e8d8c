"""Rules of addresses that a job calls: rewards, judges, trackers, traces. Rule: pure, without name resolution."""

import ipaddress
import re
import socket
import unicodedata
from collections.abc import Iterator
from typing import Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from rlhf_api.job import RLHFJobSpec
from rlhf_api.problems import Problem, Severity
from rlhf_api.rules.parts import parts, texts
from rlhf_common.tracing.settings import ENDPOINTS

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_FIELDS: Final = ("url", "uri", "endpoint")
"""Names of address fields."""
_SCHEMES: Final = frozenset({"http", "https"})
_WITH_USER: Final = re.compile(r"^[a-z][a-z0-9+.-]*://[^/?#\s]*@", re.IGNORECASE)
_USER: Final = re.compile(r"(?<=://)[^/?#]*@")
_SECRET_PARAMETER: Final = re.compile(
    r"(^|[-_])(api[-_]?key|access[-_]?key|auth|authorization|credential|key|passwd|password|pwd|secret|sig|signature|token)$",
    re.IGNORECASE,
)
_SECRET_HEADER: Final = re.compile(r"^(proxy-)?authorization$|^cookie$|(^|-)(api-?key|token|secret)$", re.IGNORECASE)
_METADATA_NAMES: Final = frozenset({"metadata.google.internal", "metadata.goog", "instance-data.ec2.internal"})
_METADATA_ADDRESSES: Final = tuple(
    map(ipaddress.ip_network, ("169.254.0.0/16", "fe80::/10", "fd00:ec2::/32", "fd20:ce::/32", "100.100.100.200/32"))
)
"""Link-local addresses, and the other metadata addresses of EC2, Google and Alibaba."""
_LINK_LOCAL_IN_NAME: Final = re.compile(r"(^|[.-])169[.-]254[.-]\d+[.-]\d+([.-]|$)|(^|\.)a9fea9fe(\.|$)")
"""Link-local addresses in names that resolve to the address in the name, such as those of nip.io."""
_IN_LAST_BITS: Final = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "::/96", "::ffff:0:0:0/96")))
"""Networks whose last 32 bits are an IPv4 address."""
_BY_HEADER: Final = "everyone who can read the job can read it: set a header with a secretKeyRef"


def urls(spec: RLHFJobSpec) -> Iterator[tuple[str, str]]:
    """Yield (manifest path, address) of the fields of a job that are named like an address."""
    for path, part in parts(spec, "spec"):
        for name in _FIELDS:
            if isinstance(value := getattr(part, name, None), str):
                yield f"{path}.{name}", value


def url_problems(spec: RLHFJobSpec) -> Iterator[Problem]:
    """Yield invalid addresses and addresses with credentials, and warn of texts that look like secrets."""
    fields = dict(urls(spec))
    for field, url in fields.items():
        yield from _address(field, url)
    data = spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    for field, text in texts(data, "spec"):
        if field not in fields and _WITH_USER.match(text):
            message = "holds credentials in clear text, which everyone who can read the job can read: use a Secret"
            yield Problem(field, _shown(text), message, severity=Severity.WARNING)
    yield from _headers(spec)
    for group in ("coordinator", "generation", "inference", "training"):
        yield from _variables(getattr(spec, group).template, f"spec.{group}.template")


def is_loopback(url: str) -> bool:
    """Return whether an address leads to the calling pod itself."""
    try:
        host = _host(urlsplit(url))
    except ValueError:
        return False
    if host in {"localhost", "ip6-localhost", "ip6-loopback"} or host.endswith((".localhost", ".localdomain")):
        return True
    return any(each.is_loopback or each.is_unspecified for each in _addresses(host))


def _address(field: str, url: str) -> Iterator[Problem]:
    try:
        parsed = urlsplit(url)
        parsed.port  # noqa: B018 raises ValueError
    except ValueError as error:
        yield Problem(field, _shown(url), f"is no address: {error}")
        return
    if parsed.scheme.lower() not in _SCHEMES:
        return
    if any(letter.isspace() or letter == "\\" or not letter.isprintable() for letter in url):
        yield Problem(field, _shown(url), "must hold no blanks, backslashes or control characters")
        return
    if parsed.username is not None or parsed.password is not None:
        yield Problem(field, _shown(url), f"must not hold credentials: {_BY_HEADER}")
    elif names := [name for name, _ in parse_qsl(parsed.query) if _SECRET_PARAMETER.search(name)]:
        message = f"seems to hold a secret in its parameter {names[0]}, and {_BY_HEADER}, where the server takes it"
        yield Problem(field, _without_query(parsed), message, severity=Severity.WARNING)
    host = _host(parsed)
    if not host:
        yield Problem(field, _shown(url), "must name a host, such as http://rewards:8000/score")
    elif wrong := _wrong_host(host):
        yield Problem(field, _shown(url), wrong)


def _wrong_host(host: str) -> str:
    """Return why no service of a job can be at a host; empty if one can."""
    if host in _METADATA_NAMES or _LINK_LOCAL_IN_NAME.search(host):
        return "is where a cloud serves credentials of its machines: name the server that is meant"
    for address in _addresses(host):
        if any(address in network for network in _METADATA_ADDRESSES if network.version == address.version):
            where = "an address at which clouds serve credentials of their machines"
            return f"leads to {address}, {where}: name the server that is meant"
        if address.is_multicast or str(address) == "255.255.255.255":
            return f"leads to {address}, at which no server is: name the server that is meant"
    return ""


def _host(parsed: SplitResult) -> str:
    """Return the host in a normal form: unquoted, NFKC, lower case, without a final dot; empty if there is none."""
    return unicodedata.normalize("NFKC", unquote(parsed.hostname or "")).lower().rstrip(".")


def _addresses(host: str) -> list[Address]:
    """Return the address of a host, and those embedded in it; nothing for a name."""
    try:
        address: Address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        try:
            # inet_aton accepts the same spellings as resolvers: 0xa9fea9fe, 2852039166, 0251.0376.0251.0376,
            # 169.16689662.
            return [ipaddress.IPv4Address(socket.inet_aton(host))] if host and not re.search(r"\s", host) else []
        except (OSError, ValueError):
            return []
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    within = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if any(address in network for network in _IN_LAST_BITS) and not (address.is_loopback or address.is_unspecified):
        within.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return [address, *(each for each in within if each is not None)]


def _headers(spec: RLHFJobSpec) -> Iterator[Problem]:
    for path, part in parts(spec, "spec"):
        headers = getattr(part, "headers", None)
        for index, header in enumerate(headers if isinstance(headers, list) else ()):
            if header.value and _SECRET_HEADER.search(header.name):
                message = "is stored and shown in clear text: give a secret by secretKeyRef"
                yield Problem(f"{path}.headers[{index}].value", "***", message, severity=Severity.WARNING)


def _variables(template: object, path: str) -> Iterator[Problem]:
    """Yield the problems of collector addresses in the environment variables of a template."""
    entries = dict(texts(template, path))
    for field, name in entries.items():
        value_field = f"{field.removesuffix('.name')}.value"
        if name in ENDPOINTS and value_field in entries and not _WITH_USER.match(entries[value_field]):
            yield from _address(value_field, entries[value_field])


def _shown(url: str) -> str:
    return _USER.sub("***@", url)


def _without_query(parsed: SplitResult) -> str:
    return parsed._replace(query="...", fragment="").geturl()
