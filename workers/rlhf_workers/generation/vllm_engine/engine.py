"""The vLLM engine: gives samples to vLLM's core, and records tokens with log-probabilities and weight versions.

Must never finish a sample twice or lose one.
"""

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from time import perf_counter_ns
from typing import Any, Final

import torch
from prometheus_client.registry import Collector

from rlhf_common.samples import FinishReason, ResponsePart, SampleKey, SampleRequest
from rlhf_workers.failures import WorkError, describe
from rlhf_workers.generation.engine import (
    EngineCosts,
    EngineError,
    EngineLimits,
    EngineLoad,
    StepReport,
)
from rlhf_workers.generation.requests import check_request, known_response, sample_name
from rlhf_workers.generation.speculation.speculator import Speculator
from rlhf_workers.generation.stopping import StopRule
from rlhf_workers.generation.vllm_engine.core import CoreRequest, CoreStep, Drawn, VllmCore
from rlhf_workers.generation.vllm_engine.decode_costs import measure
from rlhf_workers.generation.vllm_engine.drafting import DraftSource, EngineDrafts
from rlhf_workers.generation.vllm_engine.expected_weights import ExpectedWeights
from rlhf_workers.generation.vllm_engine.held_sample import HeldSample
from rlhf_workers.generation.vllm_engine.kv_moves import moves_of
from rlhf_workers.generation.vllm_engine.sample_errors import ended_early, not_finite
from rlhf_workers.generation.vllm_engine.sleeping import Sleeper
from rlhf_workers.generation.vllm_engine.step_counts import count as count_step
from rlhf_workers.generation.vllm_engine.step_times import StepTimes
from rlhf_workers.generation.vllm_engine.vllm_draft_model import VllmDraftModel
from rlhf_workers.worker_role import NO_VERSION

INTERRUPTED: Final = "an update broke off after the policy's weights were replaced"
"""Reason if another part of the update failed, such as the draft model's."""


class VllmEngine:
    """Implements `Engine`, with sleep, cost measurement, load, and cache moves if the core supports them."""

    def __init__(
        self,
        core: VllmCore,
        weights: ExpectedWeights,
        stop: StopRule,
        limits: EngineLimits,
        *,
        version: int = 0,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """`core` has the weights `version`. There is no speculator until `draft_by`.

        `facts`: what two engines must share, beside shapes and sizes, for one to read the other's caches.
        """
        self.version = version
        self.limits = limits
        self._core = core
        self._sleeper = Sleeper(core)
        self._weights = weights
        self._stop = stop
        self._stop_ids = stop.is_stop.nonzero()[0].tolist()
        self._names = (str(number) for number in count())
        self._samples: dict[str, HeldSample] = {}
        """Samples by the core's names."""
        self._by_key: dict[SampleKey, str] = {}
        self._times = StepTimes()
        self._speculator: Speculator | None = None
        self._drafting = EngineDrafts(core.drafts, None, self.vocabulary)
        self.vllm_draft_model: VllmDraftModel | None = None
        """The draft model that vLLM itself drafts with, else None; see `weight_updates.TakesDraftWeights`."""
        self._complete: list[ResponsePart] = []
        """Finished responses that are not reported yet."""
        self._broken: dict[str, EngineError] = {}
        """Errors of samples that cannot continue, by name."""
        self.moves = moves_of(core.caches, self, limits, facts or {}, self._check, stop.complete_reason)
        """See MovesKvCaches."""
        self._torn = ""
        """Reason why the last replacement of the policy's weights failed half-way; else empty."""
        self._report = StepReport()
        """Report of the next step, with what happened since the last one."""

    @property
    def vocabulary(self) -> int:
        """Width of the logits."""
        return self._weights.vocabulary

    @property
    def in_flight(self) -> int:
        """See Engine."""
        return len(self._samples) + len(self._complete)

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """See Engine; the next step finishes a sample whose tokens are already complete."""
        self._require_whole()
        taken = set(self._by_key) | {response.key for response in self._complete}
        for request in requests:
            self._check(request)
            if request.key in taken:
                raise EngineError("DuplicateSample", f"{sample_name(request.key)} is already in this engine")
            taken.add(request.key)
        for request in requests:
            reason = self._stop.complete_reason(request)
            if reason:
                self._complete.append(known_response(request, reason))
            else:
                self.take(request)

    @torch.inference_mode()
    def step(self) -> StepReport:
        """See Engine; raises EngineError while a sample is here that cannot continue."""
        self._require_whole()
        report, self._report = self._report, StepReport()
        self._drafting.offer(self._samples)
        start_ns = perf_counter_ns()
        step = self._core.step()
        step_ns = perf_counter_ns() - start_ns
        count_step(step, self._samples, report)
        report.prefill_ns = self._times.prefill_ns(step_ns, report.prefilled, report.rows)
        self._record(step, report)
        self._drafting.stepped(report, step_ns / 1e9)
        if self._broken:
            raise next(iter(self._broken.values()))
        report.finished, self._complete = self._complete, []
        return report

    def progress(self) -> list[ResponsePart]:
        """See Engine."""
        return [part for sample in self._samples.values() if (part := sample.unsent()) is not None]

    def withdraw(self, keys: Sequence[SampleKey] | None = None) -> list[ResponsePart]:
        """See Engine; a complete response that is not reported counts as finished, unless all are withdrawn."""
        withdrawn: list[ResponsePart] = []
        if keys is None:
            withdrawn, self._complete = self._complete, []
        wanted = list(self._by_key) if keys is None else [key for key in keys if key in self._by_key]
        names = [self._by_key[key] for key in wanted]
        self._core.abort([name for name in names if name not in self._broken])
        return withdrawn + [self._drop(name).response() for name in names]

    def load_weights(self, tensors: Mapping[str, torch.Tensor], version: int) -> int:
        """See Engine; current samples keep the keys and values of their tokens.

        Raises WorkError WeightsMismatch for an invalid set, WeightsTorn if the replacement failed half-way: then no
        sample is submitted or decoded until a complete version is loaded.
        """
        subject = f"actor version {version}"
        checked = self._weights.check(tensors, subject=subject)
        self._sleeper.wake_weights()
        for step in self._core.drained():
            self._record(step, self._report)
        self.version = NO_VERSION
        try:
            self._core.replace_weights(checked.named)
        except Exception as error:
            self._torn = f"{subject} was only partly replaced: {describe(error)}"
            raise WorkError("WeightsTorn", self._torn, retryable=True) from error
        self.version, self._torn = version, ""
        return checked.bytes

    def draft_by(self, speculator: DraftSource | None) -> None:
        """Set the speculator (or None) for later samples; the engine must have no samples."""
        if self.in_flight:
            raise EngineError(
                "EngineBusy", f"{self.in_flight} samples must be withdrawn before drafts come from elsewhere"
            )
        self._speculator = speculator if isinstance(speculator, Speculator) else None
        self._drafting = EngineDrafts(self._core.drafts, speculator, self.vocabulary)

    def close(self) -> None:
        """Shut the core down; the engine is unusable afterwards."""
        self._core.close()

    # ------------------------------------------------------------ abilities

    def sleep(self) -> None:
        """See Sleeps."""
        if self.in_flight:
            raise EngineError("EngineBusy", f"{self.in_flight} samples must be withdrawn before sleep")
        self._sleeper.sleep()

    def wake(self) -> None:
        """See Sleeps."""
        self._sleeper.wake()

    def measure(self) -> Generator[None, None, EngineCosts]:
        """See MeasuresCosts."""
        self.wake()
        return measure(self._core, self.limits, self._core.cache_sizes())

    @property
    def speculator(self) -> Speculator | None:
        """See Speculates."""
        return self._speculator

    @property
    def load(self) -> EngineLoad:
        """See ReportsLoad."""
        return self._core.statistics.load

    @property
    def registry(self) -> Collector:
        """See ServesMetrics."""
        return self._core.statistics.registry

    def _require_whole(self) -> None:
        if self.version == NO_VERSION:
            why = self._torn or INTERRUPTED
            raise EngineError("NotReady", f"the engine holds no whole version of the weights: {why}")

    # ------------------------------------------------------------ for its cache moves

    def name_of(self, key: SampleKey) -> str | None:
        """Return the core's name of an unfinished sample; None if it is not here."""
        return self._by_key.get(key)

    def carried(self, key: SampleKey) -> SampleRequest:
        """Return the request that continues a sample after its last token."""
        sample = self._samples[self._by_key[key]]
        response = sample.response()
        return replace(
            sample.request,
            tokens=response.tokens,
            log_probabilities=response.log_probabilities,
            versions=response.versions,
        )

    def take(self, request: SampleRequest, *, arrives: bool = False) -> str:
        """Add a sample, checked and not complete, to the core; return its name there.

        `arrives`: it comes with a cache that no other sample may read, because older weights may have computed parts of
        it.
        """
        self._sleeper.wake()
        name = next(self._names)
        self._core.add(
            CoreRequest(
                name,
                [*request.prompt.tolist(), *request.tokens.tolist()],
                len(request.prompt),
                request.max_response_tokens - len(request.tokens),
                self._stop_ids,
                request.random_key,
                salt=f"arrived {name}" if arrives else "",
                drawing=request.drawing,
            )
        )
        self._samples[name] = HeldSample(request)
        self._drafting.begin(request)
        self._by_key[request.key] = name
        return name

    def _check(self, request: SampleRequest) -> None:
        check_request(request, self.limits, self.vocabulary)

    def _drop(self, name: str) -> HeldSample:
        sample = self._samples.pop(name)
        del self._by_key[sample.request.key]
        self._broken.pop(name, None)
        self._drafting.end(sample.request.key)
        return sample

    # ------------------------------------------------------------ results of a step

    def _record(self, step: CoreStep, report: StepReport) -> None:
        over: list[str] = []
        for drawn in step.drawn:
            sample = self._samples.get(drawn.name)
            if sample is None:
                continue
            began, before = sample.began, len(sample.sequence)
            reason = self._draw(sample, drawn, report)
            self._drafting.drew(sample.request.key, step.drafts.get(drawn.name, ()), sample.sequence[before:])
            if sample.began and not began:
                report.began.append(sample.request.key)
            if (reason or drawn.name in self._broken) and not drawn.ended:
                over.append(drawn.name)
            if reason:
                self._complete.append(self._drop(drawn.name).response(reason=reason))
            elif drawn.ended and drawn.name not in self._broken:
                self._broken[drawn.name] = ended_early(sample.request.key, sample.length, drawn.ended)
        self._core.abort(over)

    def _draw(self, sample: HeldSample, drawn: Drawn, report: StepReport) -> FinishReason:
        """Add drawn tokens up to the end of the response; return the finish reason, empty while it continues."""
        for token, log_probability in zip(drawn.tokens, drawn.log_probabilities, strict=True):
            if not math.isfinite(log_probability):
                self._broken[drawn.name] = not_finite(sample.request.key, self.version)
                return ""
            sample.draw(token, log_probability, self.version)
            report.decoded += 1
            if self._stop.is_stop[token]:
                return "stop"
            if self._stop.may_complete[token] and self._stop.ends_with_string(sample.newest(self._stop.window)):
                return "stop"
            if sample.length >= sample.request.max_response_tokens:
                return "length"
        return ""
