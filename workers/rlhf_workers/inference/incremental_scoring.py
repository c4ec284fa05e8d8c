"""Scores chunks of unfinished samples ahead, so that a finished one needs only its rest.

Rule: a prefix is used only for the tokens and weights it was computed with.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import torch

from rlhf_common import control_pb2 as pb
from rlhf_common.samples import ScoringSample
from rlhf_workers.devices.device import device_memory, free_memory
from rlhf_workers.inference.model_scorer import TokenScorer, check_ids
from rlhf_workers.inference.partial_scores import PartialScore, PartialScoreStore
from rlhf_workers.sample_codec import tokens_of
from rlhf_workers.worker_role import Outbox

log = logging.getLogger(__name__)

SPAN: Final = "score-prefix/{task}"
ROWS: Final = 16
"""Maximum samples per pass; joining their keys and values costs memory."""
CPU_BYTES: Final = 1 << 30
"""Budget in bytes on a CPU, or a sixteenth of the machine's memory if that is less."""
PASS_TOKENS: Final = 512
"""Maximum tokens of a pass over several samples."""
GPU_SHARE: Final = 0.25
"""Share of the free memory that prefixes may take; the rest serves activations and whole passes."""


def prefix_budget(device: torch.device) -> int:
    """Return the bytes that prefixes may take on a device."""
    if device.type != "cuda":
        return min(CPU_BYTES, device_memory(device) // 16)
    return int(GPU_SHARE * free_memory(device))


class IncrementalScoring:
    """Scores ahead for the inference role."""

    def __init__(self, scorers: Mapping[str, TokenScorer], batch_tokens: int, budget: int) -> None:
        """`scorers` by task; `batch_tokens` 0 runs samples one by one."""
        self._scorers = scorers
        self._batch_tokens = batch_tokens
        self._store = PartialScoreStore(budget)
        self._asked: dict[int, pb.PrefixSample] = {}

    def ask(self, message: pb.PrefixSample) -> None:
        """Queue an unfinished sample with its tokens, unless it is of an earlier iteration; WorkError for invalid
        tokens."""
        prompt, response = tokens_of(message, "prompt"), tokens_of(message, "response")
        tokens = np.concatenate([prompt, response])
        for task in self._able(message):
            check_ids(tokens, self._scorers[task].vocabulary)
        if self._store.enter(message.key.iteration):
            self._store.update(message.key.sample, len(prompt), tokens)
            self._asked[message.key.sample] = message

    def step(self, outbox: Outbox, ready: Callable[[str], bool]) -> bool:
        """Answer queued samples with nothing left until a pass of a `ready` task can run; return whether one began."""
        for sample, message in list(self._asked.items()):
            left = [task for task in self._able(message) if self._left(sample, task)]
            task = next(filter(ready, left), None)
            if task is not None:
                self._run(task, self._batch(sample, task), outbox)
                return True
            if not left:
                self._answer(sample, outbox)
        return False

    def take(self, task: str, sample: ScoringSample) -> PartialScore | None:
        """Remove and return the prefix of a finished sample under a task; None if none can be used."""
        if not self._store.enter(sample.key.iteration):
            return None
        self._asked.pop(sample.key.sample, None)
        return self._store.take(sample.key.sample, task, len(sample.prompt), sample.tokens)

    def drop_task(self, task: str) -> None:
        """Drop the prefixes of a task whose model has new weights."""
        self._store.drop_task(task)

    def clear(self) -> None:
        """Drop everything."""
        self._asked.clear()
        self._store.clear()

    # ------------------------------------------------------------ parts

    def _able(self, message: pb.PrefixSample) -> list[str]:
        """Return the sample's tasks whose models can run in chunks."""
        return [task for task in message.tasks if task in self._scorers and self._scorers[task].chunks is not None]

    def _left(self, sample: int, task: str) -> int:
        """Return the tokens of the next pass; 0 if there are none."""
        growing, chunks = self._store.get(sample), self._scorers[task].chunks
        if growing is None or chunks is None:
            return 0
        prefix = growing.prefixes.setdefault(task, PartialScore(prompt=growing.prompt))
        return chunks.next_chunk(prefix, growing.tokens, False)

    def _batch(self, first: int, task: str) -> list[int]:
        """Return the samples that share the next pass: `first`, and others that fit."""
        batch, widest = [first], self._left(first, task)
        for sample, message in self._asked.items():
            if sample == first or task not in self._able(message) or len(batch) == ROWS:
                continue
            width = self._left(sample, task)
            if width and (len(batch) + 1) * max(widest, width) <= min(PASS_TOKENS, self._batch_tokens):
                batch.append(sample)
                widest = max(widest, width)
        return batch

    def _run(self, task: str, batch: list[int], outbox: Outbox) -> None:
        chunks, rows = self._scorers[task].chunks, [self._store.get(sample) for sample in batch]
        growing = [row for row in rows if row is not None]
        assert chunks is not None
        prefixes = [row.prefixes[task] for row in growing]
        before, start_ns = sum(prefix.positions for prefix in prefixes), time.time_ns()
        try:
            chunks.advance(prefixes, [row.tokens for row in growing], ended=False)
            chunks.wait()
        except Exception as error:
            log.warning("task %s failed on the prefixes of %d samples (%s); they are dropped", task, len(batch), error)
            for sample in batch:
                self._store.drop(sample)
                self._answer(sample, outbox)
            return
        done = sum(prefix.positions for prefix in prefixes) - before
        end_ns, iteration = time.time_ns(), self._asked[batch[0]].key.iteration
        attributes = {"samples": str(len(batch)), "tokens": str(done)}
        outbox.span(SPAN.format(task=task), start_ns, end_ns, iteration, **attributes)
        scoring = pb.ScoringObservation(task=task, samples=len(batch), tokens=done)
        outbox.observe(pb.Observation(start_ns=start_ns, end_ns=end_ns, iteration=iteration, scoring=scoring))
        outbox.count(done)
        self._store.make_room()

    def _answer(self, sample: int, outbox: Outbox) -> None:
        message, growing = self._asked.pop(sample), self._store.get(sample)
        able = [] if growing is None else self._able(message)
        done = [growing.prefixes[task].positions for task in able if growing is not None and task in growing.prefixes]
        outbox.prefix(
            pb.ScoredPrefix(
                key=message.key,
                tokens=min(done, default=0),
                dropped=self._store.reported(),
                cache_bytes=self._store.bytes,
            )
        )
