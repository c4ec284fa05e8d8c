"""The client returns a process with its end, also if both replies of the fork server come at once."""

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli.local.fork_client import ForkServerClient, ForkServerError
from rlhf_cli.local.pods_to_processes import LocalProcess
from rlhf_common.names import Group

FORKED = {"pid": 7}
ENDED = {"ended": 7, "code": 3}


class ScriptedServer:
    """A fork server that answers an order with lines, all at once, and may end after them."""

    def __init__(self, *replies: dict[str, int], ends: bool) -> None:
        self.replies, self.ends = replies, ends
        self.stdin, self.stdout, self.returncode = self, asyncio.StreamReader(), 0
        self.stdout.feed_data(b'{"ready": true}\n')

    def write(self, order: bytes) -> None:
        assert json.loads(order)["name"] == "generation-0"
        self.stdout.feed_data(b"".join(json.dumps(reply).encode() + b"\n" for reply in self.replies))
        if self.ends:
            self.stdout.feed_eof()

    async def drain(self) -> None: ...

    async def wait(self) -> int:
        return self.returncode


def served(monkeypatch: pytest.MonkeyPatch, server: ScriptedServer) -> ForkServerClient:
    client: Any = ForkServerClient({})

    async def begin(*_: object) -> ScriptedServer:
        return server

    monkeypatch.setattr(client, "_begin", begin)
    return client  # type: ignore[no-any-return]


def worker(folder: Path) -> LocalProcess:
    command = (sys.executable, "-m", "rlhf_workers")
    return LocalProcess("generation-0", Group.GENERATION, command, {}, folder, folder / "generation-0.log")


@pytest.mark.parametrize(
    ("replies", "ends", "code"),
    [
        ((FORKED, ENDED), False, 3),
        ((FORKED, ENDED), True, 3),
        ((FORKED,), True, -signal.SIGKILL),
    ],
)
async def test_a_process_that_ends_with_its_fork_is_returned_with_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replies: tuple[dict[str, int], ...], ends: bool, code: int
) -> None:
    """The end was once read before the fork was returned: a KeyError ended the run."""
    client = served(monkeypatch, ScriptedServer(*replies, ends=ends))
    forked = await client.start(worker(tmp_path))
    assert (forked.pid, await asyncio.wait_for(forked.wait(), 10)) == (7, code)


async def test_a_server_that_dies_before_it_forks_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = served(monkeypatch, ScriptedServer(ends=True))
    with pytest.raises(ForkServerError, match="has died"):
        await client.start(worker(tmp_path))
    assert not client.broken
