"""Calls an environment for many samples at once, while the compute thread decodes others.

Rule: the compute thread submits and collects without waiting. A failure is never an answer or a reward.
"""

import json
import queue
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from rlhf_api.job.environment import Environment
from rlhf_common import control_pb2 as pb
from rlhf_common.samples import SampleKey
from rlhf_workers.failures import failure_of
from rlhf_workers.generation.environment.turns import AnsweredTurn
from rlhf_workers.user_code.code_settings import NO_SETTINGS, CodeSettings
from rlhf_workers.user_code.event_loop_thread import EventLoopThread
from rlhf_workers.user_code.user_process import UserCode, UserProcess
from rlhf_workers.user_code.user_processes import UserProcesses

FIELD: Final = "spec.rollout.environment"
NAME: Final = "Environment"
"""Prefix of failure reasons."""
DIVERGED: Final = f"{NAME}Diverged"
INVALID: Final = f"{NAME}Invalid"
ENVIRONMENT_FAILURES: Final = (*(f"{NAME}{kind}" for kind in ("Raised", "Timeout", "Died")), DIVERGED, INVALID)
"""Failure reasons that are the environment's."""


@dataclass(frozen=True)
class EnvironmentOutcome:
    """Result of the turns of one sample."""

    key: SampleKey
    steps: tuple[AnsweredTurn, ...]
    """A step for each turn; empty if there is a failure."""
    failure: pb.Failure | None


class EnvironmentCalls:
    """Calls an environment's processes from a separate thread."""

    def __init__(self, environment: Environment, threads: int, settings: CodeSettings = NO_SETTINGS) -> None:
        """`settings`: variables of its processes."""
        where = ("--file", environment.file) if environment.file else ("--module", environment.module or "")
        host = "rlhf_workers.generation.environment.environment_host"
        arguments = (*where, "--name", environment.name)
        variables = settings.values, settings.secret
        code = UserCode(host, "environment", NAME, INVALID, arguments, FIELD, threads, *variables)
        self._timeout = float(environment.timeout_seconds)
        self._processes = UserProcesses(code, self._timeout, f"{FIELD}.timeoutSeconds")
        self._thread = EventLoopThread("environment")
        self._outcomes: queue.SimpleQueue[tuple[int, EnvironmentOutcome]] = queue.SimpleQueue()
        self._running: dict[SampleKey, tuple[int, Future[None]]] = {}
        self._calls = 0

    def start(self) -> None:
        """Start the thread and a first process; WorkError names the field if loading fails."""
        self._thread.start()
        try:
            self._thread.run(self._processes.start()).result()
        except BaseException:
            self.close()
            raise

    def submit(self, key: SampleKey, record: str, turns: Sequence[str]) -> None:
        """Begin a call with all turns of a sample; `collect` returns its outcome."""
        self._calls += 1
        self._running[key] = self._calls, self._thread.run(self._answer(self._calls, key, record, list(turns)))

    def collect(self) -> list[EnvironmentOutcome]:
        """Return the new outcomes in order of arrival, without those of forgotten or replaced calls."""
        outcomes = []
        while not self._outcomes.empty():
            number, outcome = self._outcomes.get()
            if outcome.key in self._running and self._running[outcome.key][0] == number:
                del self._running[outcome.key]
                outcomes.append(outcome)
        return outcomes

    def forget(self, key: SampleKey) -> None:
        """Cancel the call of a sample, if there is one."""
        number_and_future = self._running.pop(key, None)
        if number_and_future is not None:
            number_and_future[1].cancel()

    def close(self) -> None:
        """End processes and thread."""
        for key in list(self._running):
            self.forget(key)
        self._thread.close(self._processes.close())

    async def _answer(self, number: int, key: SampleKey, record: str, turns: list[str]) -> None:
        episode = f"{key.iteration}/{key.sample}/{key.attempt}"
        request = {"episode": episode, "record": json.loads(record or "{}"), "turns": turns}

        async def take(child: UserProcess) -> tuple[AnsweredTurn, ...]:
            steps = (await child.ask(request))["steps"]
            return tuple(AnsweredTurn(**{**step, "messages": tuple(step["messages"])}) for step in steps)

        try:
            # A process that does not know the episode takes all its turns again.
            outcome = EnvironmentOutcome(key, await self._processes.run(take, self._timeout * len(turns)), None)
        except Exception as error:
            outcome = EnvironmentOutcome(key, (), failure_of(error, "environment"))
        self._outcomes.put((number, outcome))
