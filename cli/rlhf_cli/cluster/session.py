"""What every verb does around its own work: connect with the flags, find the job, write to the terminal.

Rule: output goes to standard output and nothing else does; notes and troubles go to standard error.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

from rlhf_api import names
from rlhf_cli.cluster.api import Api
from rlhf_cli.cluster.connection import connect
from rlhf_cli.cluster.errors import AbsentError, VerbError
from rlhf_cli.cluster.stored import Stored, near
from rlhf_cli.console import errors, output

WITHOUT_LIMIT: Final = 100_000
"""Columns of output that goes nowhere with a width: lines are never broken there."""


@dataclass(frozen=True)
class Target:
    """The common flags."""

    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None


class Session:
    """One command at work."""

    def __init__(self, api: Api, namespace: str) -> None:
        self.api = api
        self.namespace = namespace
        self.out: Console = output()
        self.err: Console = errors()
        self.live = self.out.is_terminal

    @property
    def width(self) -> int | None:
        """Of a terminal; None in a pipe."""
        return self.out.width if self.live else None

    def write(self, lines: Iterable[Text | str]) -> None:
        """Line by line, as they are."""
        for line in lines:
            self.out.print(line, markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """To standard error."""
        self.err.print(text, markup=False, style="dim", soft_wrap=True)

    async def job(self, name: str) -> Stored:
        """The job. Raises AbsentError with names that are near."""
        try:
            return Stored(await self.api.get(names.PLURAL, self.namespace, name))
        except AbsentError as problem:
            raise AbsentError(await self._absent(name)) from problem

    async def _absent(self, name: str) -> str:
        told = f"there is no RLHFJob {name} in namespace {self.namespace}"
        try:
            here, _ = await self.api.listing(names.PLURAL, self.namespace)
        except VerbError:
            return told
        close = near(name, [each["metadata"]["name"] for each in here])
        if close:
            return f"{told}; did you mean {' or '.join(close)}?"
        try:
            every, _ = await self.api.listing(names.PLURAL, None, fieldSelector=f"metadata.name={name}")
        except VerbError:
            every = []
        if every:
            others = " or ".join(f"-n {each['metadata']['namespace']}" for each in every[:3])
            return f"{told}, but elsewhere: {others}"
        return f"{told}" + (" (it has none at all); `rlhf get -A` shows all" if not here else "; `rlhf get` shows all")


def run(target: Target, work: Callable[[Session], Awaitable[int]]) -> int:
    """Connects, does the work, and closes; the exit code. Raises VerbError."""

    async def whole() -> int:
        connection = await connect(target.kubeconfig, target.context)
        async with Api(connection) as api:
            return await work(Session(api, target.namespace or connection.namespace))

    return asyncio.run(whole())


def now() -> datetime:
    """The clock that ages are counted by."""
    return datetime.now(UTC)
