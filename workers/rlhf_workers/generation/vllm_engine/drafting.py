"""Requests drafts for samples of the vLLM engine before a step, and reports their outcomes after it.

Rule: a sample gets no draft if its response can use no token after the next one.
"""

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Protocol

from rlhf_common.samples import SampleKey, SampleRequest, TokenArray
from rlhf_workers.generation.engine import StepReport
from rlhf_workers.generation.speculation.drafter import MAX_DRAFT, DraftRequest, tokens_right
from rlhf_workers.generation.speculation.speculator import Verified
from rlhf_workers.generation.vllm_engine.held_sample import HeldSample


class VerifyingCore(Protocol):
    """`core_drafts.CoreDrafts`: drafts for the core's next step, by the core's sample names."""

    def decoding(self) -> dict[str, int]: ...
    def room(self, decoding: Mapping[str, int], longest: Mapping[str, int]) -> dict[str, int]: ...
    def offer(self, name: str, draft: list[int]) -> None: ...


class DraftSource(Protocol):
    """`Speculator`: decides on drafts, and learns from their outcomes."""

    def begin(self, request: SampleRequest) -> None: ...
    def extend(self, key: SampleKey, tokens: TokenArray) -> None: ...
    def end(self, key: SampleKey) -> None: ...
    def wants(self, rows: int, keys: int) -> bool: ...
    def propose(self, requests: Sequence[DraftRequest], keys: int) -> list[TokenArray]: ...
    def verified(
        self, outcomes: Sequence[Verified], pass_rows: int, keys: int, draft_seconds: float, pass_seconds: float
    ) -> None: ...


class EngineDrafts:
    """Drafts of one engine; without a speculator only vLLM drafts, if it is configured to."""

    def __init__(self, core: VerifyingCore, speculator: DraftSource | None, vocabulary: int) -> None:
        self._core = core
        self._speculator = speculator
        self._vocabulary = vocabulary
        self._asked = False
        """Whether the speculator was asked for the coming or recorded step."""
        self._outcomes: list[Verified] = []
        self._seconds = 0.0
        """Seconds of drafting for that step."""

    def begin(self, request: SampleRequest) -> None:
        """Register a sample that is decoded here from now on."""
        if self._speculator is not None:
            self._speculator.begin(request)

    def end(self, key: SampleKey) -> None:
        """Remove a sample that ended here."""
        if self._speculator is not None:
            self._speculator.end(key)

    def offer(self, samples: Mapping[str, HeldSample]) -> None:
        """Request drafts for the core's next step, if they are wanted."""
        self._asked = False
        decoding = self._core.decoding() if self._speculator is not None else {}
        if not decoding or self._speculator is None:
            return
        started, keys = perf_counter(), sum(decoding.values())
        self._asked = True
        if self._speculator.wants(len(decoding), keys):
            longest = {name: min(MAX_DRAFT, samples[name].left - 1) for name in decoding if name in samples}
            room = {name: tokens for name, tokens in self._core.room(decoding, longest).items() if tokens > 0}
            asked = [
                DraftRequest(sample.request.key, sample.sequence, len(sample.request.prompt), room[name])
                for name, sample in ((name, samples[name]) for name in room)
            ]
            proposed = self._speculator.propose(asked, keys) if asked else []
            for name, tokens in zip(room, proposed, strict=True):
                if draft := self._sound(tokens[: room[name]]):
                    self._core.offer(name, draft)
        self._seconds = perf_counter() - started

    def drew(self, key: SampleKey, drafted: Sequence[int], tokens: TokenArray) -> None:
        """Record the tokens that a step drew for a sample, up to the end of its response, and its drafted tokens."""
        if self._speculator is not None:
            self._speculator.extend(key, tokens)
        if drafted:
            self._outcomes.append(Verified(key, *judged(drafted, tokens.tolist())))

    def stepped(self, report: StepReport, seconds: float) -> None:
        """Add draft counts to `report`, and report the step and its pass seconds to the speculator if that was
        asked."""
        outcomes, self._outcomes = self._outcomes, []
        report.drafted = sum(outcome.drafted for outcome in outcomes)
        report.accepted = sum(outcome.accepted for outcome in outcomes)
        report.draft_ns = int(self._seconds * 1e9)
        report.verify_ns = int(seconds * 1e9) if report.pass_rows > report.rows else 0
        if self._speculator is not None and self._asked and report.rows:
            self._speculator.verified(outcomes, report.pass_rows, report.positions, self._seconds, seconds)
        self._seconds = 0.0

    def _sound(self, tokens: TokenArray) -> list[int]:
        """Return a draft up to its first invalid token; drafters are not trusted."""
        strange = ((tokens < 0) | (tokens >= self._vocabulary)).nonzero()[0]
        sound: list[int] = (tokens[: strange[0]] if len(strange) else tokens).tolist()
        return sound


def judged(drafted: Sequence[int], drawn: Sequence[int]) -> tuple[int, int]:
    """Return how many drafted tokens were judged, and how many were accepted.

    `drawn` are the response tokens at their positions.
    """
    accepted = tokens_right(drafted, drawn)
    return (len(drafted) if accepted < len(drawn) else accepted), accepted
