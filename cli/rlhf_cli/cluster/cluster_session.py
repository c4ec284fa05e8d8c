"""One command at work against a cluster: connect by the common flags, find the job, write to the terminal.

Rule: standard output carries the result of a verb; notes go to standard error.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rlhf_cli.cluster.api import Api
from rlhf_cli.cluster.cluster_job import ClusterJob, similar_names
from rlhf_cli.cluster.errors import VerbError
from rlhf_cli.console import errors, output
from rlhf_common import names
from rlhf_common.names import ExitCode
from rlhf_operator.api_client.connection import ConnectionConfigError, find_connection
from rlhf_operator.api_client.errors import ApiError, MissingError


@dataclass(frozen=True)
class ConnectionFlags:
    """Flags of a verb for a cluster: --kubeconfig, --context, --namespace."""

    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None


class ClusterSession:
    """Connection, namespace and terminal of one command."""

    def __init__(self, api: Api, namespace: str) -> None:
        self.api = api
        self.namespace = namespace
        self.out: Console = output()
        self.err: Console = errors()
        self.live = self.out.is_terminal

    @property
    def width(self) -> int | None:
        """Columns of the terminal; None if standard output is none."""
        return self.out.width if self.live else None

    def write(self, lines: Iterable[Text | str]) -> None:
        """Print lines to standard output, unbroken."""
        for line in lines:
            self.out.print(line, markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """Print a note to standard error."""
        self.err.print(text, markup=False, style="dim", soft_wrap=True)

    async def job(self, name: str) -> ClusterJob:
        """Return the job of this name. Raises MissingError, which suggests similar names, or another ApiError or
        VerbError.
        """
        try:
            return ClusterJob(await self.api.get(names.PLURAL, self.namespace, name))
        except MissingError as problem:
            raise MissingError(await self._absent(name), code=problem.code) from problem

    async def _absent(self, name: str) -> str:
        message = f"there is no RLHFJob {name} in namespace {self.namespace}"
        try:
            jobs, _ = await self.api.listing(names.PLURAL, self.namespace)
        except (ApiError, VerbError):
            return message
        similar = similar_names(name, [job["metadata"]["name"] for job in jobs])
        if similar:
            return f"{message}; did you mean {' or '.join(similar)}?"
        try:
            namesakes, _ = await self.api.listing(names.PLURAL, None, fieldSelector=f"metadata.name={name}")
        except (ApiError, VerbError):
            namesakes = []
        if namesakes:
            others = " or ".join(f"-n {job['metadata']['namespace']}" for job in namesakes[:3])
            return f"{message}, but elsewhere: {others}"
        return message + (" (it has none at all); `rlhf get -A` shows all" if not jobs else "; `rlhf get` shows all")


def run(flags: ConnectionFlags, verb: Callable[[ClusterSession], Awaitable[int]]) -> int:
    """Connect, run the verb and close the connection. Return the exit code.

    Raises VerbError, ApiError.
    """

    async def connected() -> int:
        try:
            connection = await find_connection(flags.kubeconfig, flags.context)
        except ConnectionConfigError as error:
            raise VerbError(str(error), ExitCode.USAGE) from error
        async with Api(connection) as api:
            return await verb(ClusterSession(api, flags.namespace or connection.namespace))

    return asyncio.run(connected())


def now() -> datetime:
    """Return the current time in UTC."""
    return datetime.now(UTC)
