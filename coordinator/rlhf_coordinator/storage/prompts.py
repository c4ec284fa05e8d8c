"""Prompts and their order: determines the prompt of every sample of every iteration.

With N prompts, group g visits entry g mod N of epoch g // N; `mixture` assigns the groups to several sources. With
shuffle, the order of an epoch is by a hash.
"""

import hashlib
import itertools
import json
import os
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from rlhf_api.algorithms.iteration_prompts import MAX_PERIOD, PromptSchedule, PromptSchedules, possible_surpluses
from rlhf_api.job import RLHFJobSpec
from rlhf_api.job.rollout import Prompts
from rlhf_common.names import ExitCode, Group
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.model_folders import local_folder
from rlhf_coordinator.storage.chat_template import template_text
from rlhf_coordinator.storage.given_responses import GivenResponse
from rlhf_coordinator.storage.mixture import Mixture
from rlhf_coordinator.storage.prompt_records import content, content_digest, places

REFILL_STREAM: Final = 0x726566696C6C
"""Separates the order of replacement prompts from other uses of the seed ("refill")."""
WINDOW_STREAM: Final = 0x77696E646F77
"""Separates the order of a sorted window's batches from other uses of the seed ("window")."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One record of the prompt file."""

    line: int
    """Number from 1: a line of a JSONL file, or a row of tables. A later source counts on from the last prompt before
    it."""
    tokens: bytes
    """Token ids as int32, little endian."""
    text: str
    """The tokenized text (for a chat, its template's rendering)."""
    record: str
    """JSON object of the record."""
    responses: tuple[GivenResponse, ...] = ()
    """Responses in the record, in the order of its group's samples; empty where responses are generated."""
    filtered: int = 0
    """Number of records just before it that were left out as too long; for the last prompt, also those after it."""
    source: int = 0
    """Index of its source."""
    warnings: tuple[str, ...] = ()
    """Warnings from reading all prompts (`prompt_warnings`), on the first prompt."""


class PromptSet:
    """All prompts of a job and their order."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        shuffle: bool,
        schedule: PromptSchedule,
        samples_per_prompt: int,
        weights: Sequence[int] = (1,),
        length_window: int = 0,
    ) -> None:
        """`schedule`: the prompts of each iteration; `schedules` may be replaced by later ones. `weights`: weights of
        the sources, in the order of their prompts. `length_window`: iterations of a sorted window."""
        self._prompts = prompts
        self._mixture = Mixture(weights)
        sizes = Counter(prompt.source for prompt in prompts)
        self._sizes = [sizes[source] for source in range(len(weights))]
        self._starts = [0, *itertools.accumulate(self._sizes)]
        self._seed = seed
        self._shuffle = shuffle
        self.schedules = PromptSchedules((schedule,))
        self._samples_per_prompt = samples_per_prompt
        # The epochs of one iteration, those of the previous one, which may be replayed, and those of waiting prompts
        # or of a window.
        cached = _prompts_remembered(schedule) + length_window * schedule.most
        epochs = sum(4 + cached // size for size in self._sizes)
        self._order_of = lru_cache(maxsize=epochs)(self._order)
        self._drawn_of = lru_cache(maxsize=2 * len(weights))(self._drawn)

    def __len__(self) -> int:
        return len(self._prompts)

    def first(self, count: int) -> Sequence[Prompt]:
        """Return the first `count` prompts, or all if there are fewer.

        Several sources take turns until one is used up; then the others follow in order.
        """
        places = map(self._mixture.place, range(min(count, len(self._prompts))))
        turns = itertools.takewhile(lambda place: place[1] < self._sizes[place[0]], places)
        entries = [self._starts[source] + nth for source, nth in turns]
        taken = set(entries)
        entries += (entry for entry in range(len(self._prompts)) if entry not in taken)
        return [self._prompts[entry] for entry in entries[:count]]

    def passes(self, iteration: int) -> list[float]:
        """Return the number of begun prompts of each source per prompt that it has, up to the end of an iteration.

        Replacements of dropped prompts do not count.
        """
        counts = self._mixture.counts(self.schedules.at(iteration).end(iteration))
        return [count / size for count, size in zip(counts, self._sizes, strict=True)]

    def group(self, sample: int) -> int:
        """Return the group of a sample inside its iteration: samples of one prompt share it."""
        return sample // self._samples_per_prompt

    def epoch(self, iteration: int) -> int:
        """Return the epoch, from 0, of the last prompt of an iteration; with several sources, the highest."""
        counts = self._mixture.counts(self.schedules.at(iteration).end(iteration))
        return max((count - 1) // size for count, size in zip(counts, self._sizes, strict=True))

    def prompt(self, iteration: int, sample: int) -> Prompt:
        """Return the prompt of a sample, from the iteration that began it and its number there."""
        return self._prompts[self._entry(iteration, self.group(sample))]

    def begun(self, number: int) -> Prompt:
        """Return the prompt of a place in the job's order, from 0."""
        return self._prompts[self._nth(number)]

    def _entry(self, iteration: int, group: int) -> int:
        schedule = self.schedules.at(iteration)
        if group >= schedule.most:
            source, nth = self._mixture.place(group - schedule.most)
            return self._starts[source] + self._drawn_of(iteration, source)[nth]
        return self._nth(schedule.first(iteration) + group)

    def _nth(self, number: int) -> int:
        source, nth = self._mixture.place(number)
        epoch, place = divmod(nth, self._sizes[source])
        return self._starts[source] + int(self._order_of(source, epoch)[place])

    def _drawn(self, iteration: int, source: int) -> "_Drawn":
        start, size = self._starts[source], self._sizes[source]
        own = {self._entry(iteration, group) - start for group in range(self.schedules.at(iteration).most)}
        return _Drawn(self._seed, iteration, source, size, own & set(range(size)))

    def response(self, iteration: int, sample: int) -> GivenResponse | None:
        """Return the response that the prompt file contains for a sample; None without one."""
        responses = self.prompt(iteration, sample).responses
        return responses[sample % self._samples_per_prompt] if responses else None

    @property
    def filtered(self) -> list[int]:
        """Number of records of each source that were left out as too long."""
        left_out = [0] * len(self._sizes)
        for prompt in self._prompts:
            left_out[prompt.source] += prompt.filtered
        return left_out

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings from reading the prompts."""
        return self._prompts[0].warnings

    def _order(self, source: int, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        count = self._sizes[source]
        if not self._shuffle:
            return np.arange(count, dtype=np.int64)
        keys = [_hash(self._seed, epoch, index, *_after_first(source)) for index in range(count)]
        return np.argsort(np.array(keys, dtype=np.uint64), kind="stable")


def _prompts_remembered(schedule: PromptSchedule) -> int:
    """Return the prompts of two iterations and of those whose prompts may still wait, for any later schedule."""
    surpluses = possible_surpluses(schedule.batch, MAX_PERIOD) if schedule.surplus == "Deferred" else ()
    possible = [schedule, *(PromptSchedule(schedule.batch, extra, "Deferred") for extra in surpluses)]
    return max((2 + each.longest_wait) * each.most for each in possible)


class _Drawn:
    """Entries of a source in an order of one iteration.

    The entries that the iteration does not have come first, each once. All entries of the source follow, again and
    again.
    """

    def __init__(self, seed: int, iteration: int, source: int, entries: int, own: set[int]) -> None:
        self._seed, self._iteration, self._entries, self._seen = seed ^ REFILL_STREAM, iteration, entries, set(own)
        self._source = _after_first(source)
        self._order: list[int] = []
        self._draws = 0

    def __getitem__(self, number: int) -> int:
        while len(self._order) <= number:
            if len(self._seen) >= self._entries:
                self._seen.clear()
            entry = _hash(self._seed, self._iteration, self._draws, *self._source) % self._entries
            self._draws += 1
            if entry not in self._seen:
                self._seen.add(entry)
                self._order.append(entry)
        return self._order[number]


def random_key(seed: int, iteration: int, sample: int) -> int:
    """Return the random key of a sample (unsigned, 64 bits)."""
    return _hash(seed, iteration, sample)


def window_key(seed: int, iteration: int, batch: int) -> int:
    """Return the random key of a batch of the sorted window that begins with an iteration (unsigned, 64 bits)."""
    return _hash(seed ^ WINDOW_STREAM, iteration, batch)


def _after_first(source: int) -> tuple[int, ...]:
    """Return the hash salt of a source; empty for the first."""
    return (source,) if source else ()


def _hash(*numbers: int) -> int:
    packed = struct.pack(f"<{len(numbers)}Q", *numbers)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def prompts_digest(spec: RLHFJobSpec, prompts: Prompts | None = None) -> str:
    """Return the SHA-256 of prompt files, the job's by default, and of the settings for reading them.

    Raises JobError.
    """
    prompts = prompts or spec.prompts
    how: list[object] = [prompts.prompt_key, prompts.chat_template, spec.models.actor.path]
    how.append(spec.rollout.max_prompt_tokens)
    if keys := spec.algorithm.fields.response_keys:
        how.append([*keys, spec.rollout.max_response_tokens])
    if prompts.overlong != "Fail":
        how.append(prompts.overlong)
    if prompts.columns:
        how.append({"columns": prompts.columns})
    how += _rendered_by(prompts)
    digest = hashlib.sha256(json.dumps(how, sort_keys=True).encode())
    for file, whole in places(prompts):
        if prompts.sources:
            digest.update(content_digest(whole) + json.dumps([file.weight, file.prompt_key]).encode())
            continue
        for block in content(whole):
            digest.update(block)
    return digest.hexdigest()


def _rendered_by(prompts: Prompts) -> Iterator[object]:
    if prompts.chat_template_file is not None:
        yield {"template": template_text(prompts)}
    if prompts.chat_template_arguments:
        yield {"arguments": prompts.chat_template_arguments}
    if prompts.system_message is not None:
        yield {"system": prompts.system_message}


def load_tokenizer(source: str, rank_group: Group = Group.TRAINING) -> Any:
    """Return the actor's tokenizer, from a folder or a hub id. Raises JobError (exit code 21) when there is none."""
    field = "spec.models.actor.path"
    if Path(source).is_absolute() and not Path(source).is_dir():
        message = f"{source}: there is no such folder; in a cluster the coordinator mounts what training pods mount"
        raise JobError("ModelMissing", message, field=field, exit_code=ExitCode.BAD_MODEL)
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(source)
    except Exception as error:  # every tokenizer format fails in its own way
        if local_folder(source) is None:
            message = (
                f"{source}: it is no folder here, and its tokenizer can neither be fetched from the hub nor found in "
                f"the cache ({os.environ.get('HF_HOME') or 'HF_HOME is not set'}): let pods of the job reach the hub; "
                f"or set HF_HOME in spec.{rank_group}.template to a folder with the model on a volume that is mounted "
                "there, which the coordinator takes on; or give the path of such a folder instead"
            )
            raise JobError("ModelMissing", message, field=field, exit_code=ExitCode.BAD_MODEL) from error
        message = f"{source}: its tokenizer cannot be loaded: {error}"
        raise JobError("ModelCorrupt", message, field=field, exit_code=ExitCode.BAD_MODEL) from error
