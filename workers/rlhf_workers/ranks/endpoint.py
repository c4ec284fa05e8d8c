"""One endpoint for all ranks of a pod: alive while every rank is, with the metrics of all of them.

Rule: nothing is cached. If a rank does not answer, the pod is unhealthy and the scrape fails with the rank's name.
"""

import http.client
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from rlhf_common.endpoint import LIVENESS_PATH, Application

METRICS_PATH: Final = "/metrics"
ANSWER_SECONDS: Final = 5.0
"""Time-out in seconds of the connection to a rank, and of each read of its answer."""
_OK: Final = 200
_NAMED: Final = re.compile(r'[{,]worker="')


class RanksUnwellError(Exception):
    """A rank does not answer like a healthy one."""

    def __init__(self, rank: str, status: int, text: str) -> None:
        """`status`: its HTTP status, 0 for no answer."""
        super().__init__(f"{rank}: {text}")
        self.status = status


Ask = Callable[[str, str], tuple[int, str]]
"""(host:port, path) -> HTTP status and text. Raises OSError, HTTPException."""


def ask_rank(address: str, path: str) -> tuple[int, str]:
    """Return the HTTP status and the text that a rank's endpoint answers; bytes that are not UTF-8 are replaced."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=ANSWER_SECONDS)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    finally:
        connection.close()


def answers(ranks: Mapping[str, str], path: str, ask: Ask = ask_rank) -> dict[str, str]:
    """Return rank -> answer, from rank -> host:port. Raises RanksUnwellError for the first unhealthy rank."""
    texts = {}
    for rank, address in ranks.items():
        try:
            status, text = ask(address, path)
        except (OSError, http.client.HTTPException) as error:
            raise RanksUnwellError(rank, 0, f"its endpoint does not answer: {error}") from error
        if status != _OK:
            raise RanksUnwellError(rank, status, text.strip())
        texts[rank] = text
    return texts


def ailment_of(ranks: Mapping[str, str], ask: Ask = ask_rank) -> Callable[[], str]:
    """Return a function that returns why the pod is not alive; "" while all its ranks are."""

    def ailment() -> str:
        try:
            answers(ranks, LIVENESS_PATH, ask)
        except RanksUnwellError as error:
            return str(error)
        return ""

    return ailment


def metrics_of_ranks(ranks: Mapping[str, str], ask: Ask = ask_rank) -> Application:
    """Return the application that serves the metrics of all ranks as one page. It answers 404 if the first unhealthy
    rank does, else 503.
    """

    def serve(_: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        try:
            page = merged(answers(ranks, METRICS_PATH, ask))
        except RanksUnwellError as error:
            status = "404 Not Found" if error.status == http.HTTPStatus.NOT_FOUND else "503 Service Unavailable"
            start(status, [("Content-Type", "text/plain; charset=utf-8")])
            return [f"{error}\n".encode()]
        start("200 OK", [("Content-Type", "text/plain; version=0.0.4; charset=utf-8")])
        return [page.encode()]

    return serve


def merged(pages: Mapping[str, str]) -> str:
    """Return one page from the pages of the ranks, with each family once, as the text format requires."""
    headers: dict[str, dict[str, str]] = {}
    samples: dict[str, list[str]] = {}
    for rank, page in pages.items():
        family = ""
        for line in page.splitlines():
            if line.startswith("# "):
                kind, family = line.split(" ", 3)[1:3]
                headers.setdefault(family, {}).setdefault(kind, line)
                samples.setdefault(family, [])
            elif line:
                samples.setdefault(family, []).append(_labelled(line, rank))
    lines = [line for family, listed in samples.items() for line in (*headers.get(family, {}).values(), *listed)]
    return "".join(f"{line}\n" for line in lines)


def _labelled(sample: str, rank: str) -> str:
    """Return a sample with a label for its worker."""
    name, brace, rest = sample.partition("{")
    if not brace or " " in name:
        name, _, value = sample.partition(" ")
        return f'{name}{{worker="{rank}"}} {value}'
    return sample if _NAMED.search(brace + rest) else f'{name}{{worker="{rank}",{rest}'
