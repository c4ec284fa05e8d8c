"""One endpoint for all ranks of a pod: it lives while every rank does, and its metrics are those of all of them.

Rule: it asks the ranks' own endpoints when it is asked, and keeps nothing. A rank that does not answer makes the pod
unwell, and the scrape fail, by its name: a pod whose hung rank nobody sees would train no more. Series are never
summed: one that does not name its worker is given the label `worker`.
"""

import http.client
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from rlhf_common.endpoint import LIVENESS_PATH, Application

METRICS_PATH: Final = "/metrics"
ANSWER_SECONDS: Final = 5.0
"""A rank gets to answer, half of a kubelet's patience with the pod."""
_OK: Final = 200
_NAMED: Final = re.compile(r'[{,]worker="')


class RanksUnwellError(Exception):
    """A rank does not answer as a healthy one would."""

    def __init__(self, rank: str, status: int, text: str) -> None:
        """`status`: its HTTP status, 0 for no answer."""
        super().__init__(f"{rank}: {text}")
        self.status = status


Ask = Callable[[str, str], tuple[int, str]]
"""(host:port, path) -> HTTP status and text. Raises OSError, HTTPException."""


def ask_rank(address: str, path: str) -> tuple[int, str]:
    """Ask the endpoint of a rank."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=ANSWER_SECONDS)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def answers(ranks: Mapping[str, str], path: str, ask: Ask = ask_rank) -> dict[str, str]:
    """Return rank -> what it answers, of ranks -> host:port. Raises RanksUnwellError for the first that is not well."""
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
    """Return what says why the pod does not live; "" while all its ranks do."""

    def ailment() -> str:
        try:
            answers(ranks, LIVENESS_PATH, ask)
        except RanksUnwellError as error:
            return str(error)
        return ""

    return ailment


def metrics_of_ranks(ranks: Mapping[str, str], ask: Ask = ask_rank) -> Application:
    """Return what serves the metrics of all ranks as one page; a job without metrics is answered as its ranks do."""

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
    """Return one page of the pages of the ranks, every family once, as the text format wants it."""
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
    """Return a sample that names its worker."""
    name, brace, rest = sample.partition("{")
    if not brace or " " in name:
        name, _, value = sample.partition(" ")
        return f'{name}{{worker="{rank}"}} {value}'
    return sample if _NAMED.search(brace + rest) else f'{name}{{worker="{rank}",{rest}'
