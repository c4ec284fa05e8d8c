"""A process of a local run counts as hung if it has answered before and then stops for long enough."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from rlhf_cli.local import liveness_probe
from rlhf_cli.local.liveness_probe import until_hung


class Answers:
    """Answers of a process, one per request; then it hangs."""

    def __init__(self, said: str) -> None:
        self.said: Iterator[str] = iter(said)
        self.asked = 0

    async def __call__(self, address: str) -> bool:
        self.asked += 1
        return next(self.said, "-") == "+"


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    seconds: list[float] = []

    async def sleep(period: float) -> None:
        seconds.append(period)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return seconds


@pytest.mark.parametrize(
    ("said", "asked"),
    [
        ("-----+", 6 + 15),  # it takes its time to start
        ("+-------------+", 15 + 15),  # it was slow for almost too long
        ("+", 1 + 15),
    ],
)
async def test_only_misses_in_a_row_after_an_answer_count(
    said: str, asked: int, slept: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = Answers(said)
    monkeypatch.setattr(liveness_probe, "_answers", answers)
    await until_hung("127.0.0.1:1", 300)
    assert answers.asked == asked
    starting = said.index("+") + 1
    assert slept[starting:] == [20.0] * (asked - starting)
    assert sum(slept[:starting]) < 5, "one that hangs soon after its start has answered before"


@pytest.fixture
async def replying() -> AsyncIterator[dict[str, str]]:
    """Run a server that replies with `status`."""
    said = {"status": "200 OK"}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(f"HTTP/1.0 {said['status']}\r\n\r\n".encode())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    said["address"] = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield said
    server.close()


async def test_only_a_200_is_an_answer(replying: dict[str, str]) -> None:
    assert await liveness_probe._answers(replying["address"])
    replying["status"] = "503 Service Unavailable"
    assert not await liveness_probe._answers(replying["address"])
    assert not await liveness_probe._answers("127.0.0.1:1")
