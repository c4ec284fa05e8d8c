"""Responses that a run recorded in its journal, with their prompts and keys, to be gone through again.

A journal keeps the iterations from its oldest kept checkpoint on; a job that checkpoints seldom, or keeps all its
checkpoints (`spec.checkpoints.keep`), has them all.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from rlhf_api.algorithms import samples_per_prompt
from rlhf_api.job import RLHFJob
from rlhf_api.samples import SampleKey, SampleRequest, TokenArray
from rlhf_coordinator.storage.batch import finished_responses
from rlhf_coordinator.storage.journal import Journal
from rlhf_coordinator.storage.prompt_cache import tokenized_before
from rlhf_coordinator.storage.prompts import PromptSet, prompts_digest, random_key
from rlhf_coordinator.storage.sample_codec import unpacked


class RecordedResponse(NamedTuple):
    """A sample as it was asked for, and its whole response."""

    request: SampleRequest
    response: TokenArray
    prompt: int
    """Line of the prompt in its file, the same in every epoch."""


class RecordedRun:
    """One run folder."""

    def __init__(self, folder: Path) -> None:
        self.job = RLHFJob.model_validate_json((folder / "job.json").read_text())
        self._journal = Journal(folder / "journal")
        spec = self.job.spec
        prompts = tokenized_before(self._journal, prompts_digest(spec))
        if prompts is None:
            raise SystemExit(f"{folder}: its journal holds no prompts of its manifest's files, which changed since")
        self.samples_per_prompt = samples_per_prompt(spec)
        self._prompts = PromptSet(
            prompts,
            seed=spec.seed,
            shuffle=spec.prompts.shuffle,
            per_iteration=spec.rollout.batch_size // self.samples_per_prompt,
            samples_per_prompt=self.samples_per_prompt,
            weights=[file.weight for file in spec.prompts.files],
        )

    def iterations(self) -> list[int]:
        """Return the iterations that are there whole, in order."""
        return [number for number in self._journal.iterations() if len(self.samples(number)) == self._batch]

    def samples(self, iteration: int) -> list[RecordedResponse]:
        """Return the finished samples of an iteration, by their number."""
        spec, found = self.job.spec, []
        for message in finished_responses(self._journal.read(iteration)):
            number = message.key.sample
            prompt = self._prompts.of(iteration, number)
            request = SampleRequest(
                SampleKey(iteration, number, message.key.attempt),
                np.frombuffer(prompt.tokens, "<i4").astype(np.int32),
                random_key(spec.seed, iteration, number),
                spec.rollout.max_response_tokens,
            )
            response = np.frombuffer(unpacked(message.tokens, "int32"), "<i4").astype(np.int32)
            found.append(RecordedResponse(request, response, prompt.line))
        return sorted(found, key=lambda sample: sample.request.key)

    @property
    def _batch(self) -> int:
        return self.job.spec.rollout.batch_size
