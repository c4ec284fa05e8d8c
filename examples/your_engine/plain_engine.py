"""An engine in one file: a whole forward pass for every token, one sample at a time, no cache between steps.

A token depends only on the sample's random key, its position, its drawing, the parameters and the logits.
docs/tutorials/your-engine.md explains it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rlhf_api.job import RLHFJobSpec
from rlhf_common.samples import ResponsePart, SampleKey, SampleRequest, VersionSpan
from rlhf_workers.generation.engine import EngineError, EngineLimits, SamplingParameters, StepReport
from rlhf_workers.generation.requests import check_request, known_response, sample_name
from rlhf_workers.generation.sampling import WORDS_PER_BLOCK, marked, sample, uniforms
from rlhf_workers.generation.stopping import StopRule, stop_ids
from rlhf_workers.models.loading import copy_weights, load_causal_lm, matched_weights
from rlhf_workers.models.precision import compute_dtype
from rlhf_workers.worker_role import NO_VERSION


def build_engine(spec: RLHFJobSpec, tokenizer: Any, device: torch.device) -> "PlainEngine":
    """Return the engine of a job with the manifest's weights; the worker calls this function."""
    path, dtype = spec.models.actor.path, compute_dtype(spec)
    model = load_causal_lm(path, field="spec.models.actor.path", dtype=dtype, device=device, attention="eager")
    return PlainEngine(model, tokenizer, SamplingParameters.from_spec(spec), EngineLimits.from_spec(spec))


class PlainEngine:
    """Implements `rlhf_workers.generation.engine.Engine` without optional abilities."""

    def __init__(self, model: Any, tokenizer: Any, parameters: SamplingParameters, limits: EngineLimits) -> None:
        self.version = 0
        self._model, self._parameters, self._limits = model, parameters, limits
        self._vocabulary = int(model.config.get_text_config().vocab_size)
        ids = stop_ids(model, tokenizer, parameters)
        self._stop = StopRule(tokenizer, self._vocabulary, ids, parameters.stop)
        self._samples: dict[SampleKey, SampleRequest] = {}  # oldest first, each with all its tokens
        self._reported: dict[SampleKey, int] = {}  # tokens that `progress` returned, or that were known before

    @property
    def in_flight(self) -> int:
        return len(self._samples)

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        new: dict[SampleKey, SampleRequest] = {}
        for request in requests:
            check_request(request, self._limits, self._vocabulary)
            if request.key in self._samples or request.key in new:
                raise EngineError("DuplicateSample", f"{sample_name(request.key)} is already in this engine")
            new[request.key] = request
        self._samples |= new
        self._reported |= {key: len(request.tokens) for key, request in new.items()}

    def step(self) -> StepReport:
        report = StepReport()
        for key, request in list(self._samples.items())[: self._limits.max_batch_size]:
            if not self._stop.complete_reason(request):
                request = self._samples[key] = self._decoded(request)
                report.decoded += 1
                report.rows += 1
                report.keys += len(request.prompt) + len(request.tokens) - 1
            if reason := self._stop.complete_reason(request):
                report.finished.append(known_response(request, reason))
                del self._samples[key], self._reported[key]
        return report

    @torch.inference_mode()
    def _decoded(self, request: SampleRequest) -> SampleRequest:
        """Return the request with its next token."""
        ids = torch.from_numpy(np.concatenate([request.prompt, request.tokens]).astype(np.int64))[None]
        logits = self._model(input_ids=ids.to(self._model.device), use_cache=False).logits[:, -1]
        position = len(request.tokens)
        block = position - position % WORDS_PER_BLOCK
        drawn = uniforms(request.random_key, block, WORDS_PER_BLOCK)
        uniform = marked(drawn, request.drawing)[position - block]
        token, log_probability = sample(logits, torch.tensor([uniform], device=logits.device), self._parameters)
        if not bool(log_probability.isfinite()):
            message = f"{sample_name(request.key)}: weight version {self.version} of the actor gives no finite logits"
            raise EngineError("NotFinite", message, "spec.training.optimizer.learningRate")
        *spans, last = request.versions or (VersionSpan(self.version, 0),)
        if last.version != self.version:
            spans, last = [*spans, last], VersionSpan(self.version, 0)
        return replace(
            request,
            tokens=np.append(request.tokens, np.int32(token.item())),
            log_probabilities=np.append(request.log_probabilities, np.float32(log_probability.item())),
            versions=(*spans, VersionSpan(last.version, last.tokens + 1)),
        )

    def progress(self) -> list[ResponsePart]:
        parts = []
        for key, request in self._samples.items():
            reported = self._reported[key]
            if len(request.tokens) > reported:
                tokens, log_probabilities = request.tokens[reported:], request.log_probabilities[reported:]
                parts.append(ResponsePart(key, reported, tokens, log_probabilities, _after(request.versions, reported)))
                self._reported[key] = len(request.tokens)
        return parts

    def withdraw(self, keys: Sequence[SampleKey] | None = None) -> list[ResponsePart]:
        wanted = [key for key in (self._samples if keys is None else keys) if key in self._samples]
        for key in wanted:
            del self._reported[key]
        return [known_response(self._samples.pop(key), "") for key in wanted]

    def load_weights(self, tensors: Mapping[str, torch.Tensor], version: int) -> int:
        copies = matched_weights(self._model, tensors, subject=f"actor version {version}")
        self.version = NO_VERSION
        loaded = copy_weights(copies)
        self.version = version
        return loaded


def _after(spans: Sequence[VersionSpan], tokens: int) -> tuple[VersionSpan, ...]:
    """Return the spans without their first tokens."""
    rest = []
    for span in spans:
        skipped = min(span.tokens, tokens)
        tokens -= skipped
        if span.tokens > skipped:
            rest.append(VersionSpan(span.version, span.tokens - skipped))
    return tuple(rest)
