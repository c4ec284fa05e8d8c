"""Compares prompt groups with a model of the inference group, one group at a time.

Rule: a step advances one group by one part of its comparison. The compared responses of a group are answered together:
each with a result or abstained, or all with one failure.
"""

import logging
import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from rlhf_common import control_pb2 as pb
from rlhf_common.arrays import pack
from rlhf_common.samples import FloatArray, ScoringSample
from rlhf_workers.failures import WorkError, failure_of
from rlhf_workers.sample_codec import key_message
from rlhf_workers.worker_role import Outbox

log = logging.getLogger(__name__)

Comparing = Generator[None, None, list[FloatArray | None]]
"""Yields after each part; returns float32 [1] per response, or None if there is nothing to compare it with."""


@runtime_checkable
class GroupScorer(Protocol):
    """Compares the responses to a prompt on the compute thread, with its model onloaded."""

    model: Any
    frozen: bool
    """Whether the model keeps the weights of its folder."""

    def compare(self, samples: Sequence[ScoringSample]) -> Comparing:
        """Return the comparison of all responses to one prompt."""


@dataclass
class _ComparedGroup:
    task: str
    samples: Sequence[ScoringSample]
    comparing: Comparing
    start_ns: int = 0


class GroupComparisons:
    """The groups of one worker, in order of arrival."""

    def __init__(self) -> None:
        self._groups: deque[_ComparedGroup] = deque()

    @property
    def pending(self) -> int:
        """Samples without an answer."""
        return sum(len(group.samples) for group in self._groups)

    def submit(self, task: str, scorer: GroupScorer, samples: Sequence[ScoringSample]) -> None:
        """Queue all responses to one prompt."""
        self._groups.append(_ComparedGroup(task, samples, scorer.compare(samples)))

    def clear(self) -> None:
        """Drop all groups."""
        self._groups.clear()

    def step(self, outbox: Outbox) -> bool:
        """Advance the first group, and report its results when it ends; return whether there was one."""
        if not self._groups:
            return False
        group = self._groups[0]
        group.start_ns = group.start_ns or time.time_ns()
        try:
            next(group.comparing)
        except StopIteration as ended:
            self._groups.popleft()
            for sample, result in zip(group.samples, ended.value, strict=True):
                message = pb.ScoredSample(key=key_message(sample.key), task=group.task, abstained=result is None)
                if result is not None:
                    message.result.CopyFrom(pack(result))
                outbox.scored(message)
            _observe(group, outbox)
        except Exception as error:
            self._groups.popleft()
            log.error("task %s: %s", group.task, error, exc_info=None if isinstance(error, WorkError) else error)
            for sample in group.samples:
                failure = failure_of(error, "score")
                outbox.scored(pb.ScoredSample(key=key_message(sample.key), task=group.task, failure=failure))
        return True


def _observe(group: _ComparedGroup, outbox: Outbox) -> None:
    iteration, samples = group.samples[0].key.iteration, str(len(group.samples))
    outbox.span(f"score/{group.task}", group.start_ns, time.time_ns(), iteration, samples=samples)
