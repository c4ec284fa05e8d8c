"""The torch engine: continuous batching over any causal language model that transformers loads.

Rule: a prompt without its last token is prefilled; that last token and every response token go through a decode pass,
so all sampling happens in one place. Fast mode prefills a resumed sample's tokens too. Deterministic mode replays them
through decode passes, and runs only shapes proven alike (`Tiles`), so a sample's bits do not depend on batch, order,
worker or interruptions. Tokens that were known before are forced, never sampled again. Must never finish a sample twice
or lose one. When the process dies here, the coordinator has every token `progress` returned, and nothing else is kept.

What deterministic mode costs is in docs/determinism.md, measured by benchmarks/generation.py.
"""

import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch

from rlhf_api.names import ExitCode
from rlhf_api.samples import FinishReason, ResponsePart, SampleKey, SampleRequest
from rlhf_workers.failures import WorkError
from rlhf_workers.generation.engine import (
    EngineCosts,
    EngineError,
    EngineLimits,
    Prefill,
    SamplingParameters,
    StepReport,
)
from rlhf_workers.generation.requests import check_request, known_response, sample_name
from rlhf_workers.generation.sampling import sample
from rlhf_workers.generation.stopping import StopRule, stop_ids
from rlhf_workers.generation.torch_engine.decode_costs import measure
from rlhf_workers.generation.torch_engine.engine_state import EngineState
from rlhf_workers.generation.torch_engine.forward import CausalForward
from rlhf_workers.generation.torch_engine.kv_moves import TorchKvMoves
from rlhf_workers.generation.torch_engine.kv_pools import BucketedPools, DecodePass, KvPools, SinglePool, padded
from rlhf_workers.generation.torch_engine.response_table import ResponseTable, Slots
from rlhf_workers.generation.torch_engine.tiles import Tiles
from rlhf_workers.models import replace_weights
from rlhf_workers.offloadable_weights import OffloadableWeights

PREFILL_TOKENS: Final = 4096
"""Padded prompt tokens of one prefill pass, and about of all prefills of one step: a step stays well under a second."""

ADMIT_SHARE: Final = 8
"""One in so many slots must be free before a crowded engine admits: at most that share stays idle."""


class TorchEngine:
    """Implements `Engine`; it sleeps, measures its costs and moves KV caches."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        parameters: SamplingParameters,
        limits: EngineLimits,
        *,
        deterministic: bool,
        version: int = 0,
        field: str = "spec.models.actor.path",
    ) -> None:
        """`model` is in eval mode on its device; WorkError when it is of a kind that cannot be decoded (or, where
        `deterministic` asks for it, reproduced)."""
        self.version = version
        self.parameters = parameters
        self.limits = limits
        self.deterministic = deterministic
        self.device: torch.device = model.device
        self._model = model
        self._weights = OffloadableWeights(model, model.device, frozen=False)
        self._forward = CausalForward(model, field)
        self._forward.verify()
        self._tiles = Tiles(self._forward) if deterministic else None
        if self._tiles is not None:
            self._tiles.require()
        _require_context(self._forward, limits)
        self._stop = StopRule(
            tokenizer, self._forward.vocabulary, stop_ids(model, tokenizer, parameters), parameters.stop
        )
        self._state = self._empty_state()
        rules = (self._check, self._complete_reason)
        self.moves = TorchKvMoves(self._forward, limits, lambda: self._state, *rules, deterministic=deterministic)

    # ------------------------------------------------------------ Engine

    @property
    def vocabulary(self) -> int:
        """Width of the logits."""
        return self._forward.vocabulary

    @property
    def held(self) -> int:
        """See Engine."""
        return len(self._state.held)

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """See Engine; a sample whose tokens are complete already is finished by the next step."""
        new: set[SampleKey] = set()
        for request in requests:
            self._check(request)
            if request.key in self._state.held or request.key in new:
                raise EngineError("DuplicateSample", f"{sample_name(request.key)} is here already")
            new.add(request.key)
        self._state.held |= new
        for request in requests:
            reason = self._complete_reason(request)
            if reason:
                self._state.complete.append(known_response(request, reason))
            else:
                self._state.queue.append(request)

    @torch.inference_mode()
    def step(self) -> StepReport:
        """See Engine."""
        report = StepReport()
        started = time.perf_counter_ns()
        self._admit(report)
        report.prefill_ns = time.perf_counter_ns() - started
        for decode_pass in list(self._state.pools.passes(self._state.table.position)):
            self._decode(decode_pass, report)
        report.finished, self._state.complete = self._state.complete, []
        self._state.held.difference_update(response.key for response in report.finished)
        return report

    def progress(self) -> list[ResponsePart]:
        """See Engine."""
        return self._state.table.unsent()

    def withdraw(self, keys: Sequence[SampleKey] | None = None) -> list[ResponsePart]:
        """See Engine; a response that is complete but not yet reported counts as finished unless all are asked for."""
        wanted = self._state.held.copy() if keys is None else self._state.held.intersection(keys)
        if keys is not None:
            wanted.difference_update(response.key for response in self._state.complete)
        given = [response for response in self._state.complete if response.key in wanted]
        self._state.complete = [response for response in self._state.complete if response.key not in wanted]
        queued = (*self._state.queue, *self._state.waiting.values())
        given += [known_response(request, "") for request in queued if request.key in wanted]
        self._state.queue = deque(request for request in self._state.queue if request.key not in wanted)
        for key in wanted:
            self._state.waiting.pop(key, None)
        slots = [
            slot
            for slot, request in enumerate(self._state.table.requests)
            if request is not None and request.key in wanted
        ]
        given += [self._state.table.response(slot) for slot in slots]
        self._free(np.array(slots, np.int64))
        self._state.held -= wanted
        return given

    def load_weights(self, tensors: Mapping[str, torch.Tensor], version: int) -> int:
        """See Engine."""
        loaded = replace_weights(self._model, tensors, what=f"actor version {version}")
        self.version = version
        return loaded

    def sleep(self) -> None:
        """See Engine."""
        if self._state.held:
            raise EngineError("EngineBusy", f"{len(self._state.held)} samples must be withdrawn before sleep")
        self._state.pools = self._empty_pools()
        self._weights.offload()

    def wake(self) -> None:
        """See Engine."""
        self._weights.onload()

    def measure(self) -> Generator[None, None, EngineCosts]:
        """See Engine."""
        self.wake()
        return measure(self)

    @contextmanager
    def aside(self) -> Iterator[EngineState]:
        """Inside, the engine holds no sample and knows no stop; afterwards it is as it was (for measuring)."""
        state, stop = self._state, self._stop
        self._state = self._empty_state()
        self._stop = StopRule(None, self._forward.vocabulary, (), ())
        try:
            yield self._state
        finally:
            self._state, self._stop = state, stop

    def kv_bytes(self) -> int:
        """Memory of the key-value pools."""
        return self._state.pools.bytes()

    # ------------------------------------------------------------ admission

    def _check(self, request: SampleRequest) -> None:
        check_request(request, self.limits, self._forward.vocabulary)

    def _complete_reason(self, request: SampleRequest) -> FinishReason:
        return self._stop.complete_reason(request)

    def _admit(self, report: StepReport) -> None:
        """Prefills queued samples while slots and this step's share of prefill tokens last.

        Waits until an eighth of the slots (or as many as are queued) is free: a prefill pass for one or two prompts
        costs half a decode pass of all.
        """
        state = self._state
        if state.free < min(len(state.queue), -(-self.limits.max_batch_size // ADMIT_SHARE)):
            return
        share = PREFILL_TOKENS
        while state.queue and state.free > 0 and share > 0:
            batch: list[SampleRequest] = []
            length = 0
            while state.queue and len(batch) < state.free:
                longest = max(length, padded(len(self._prefix(self._state.queue[0]))))
                if batch and (longest * (len(batch) + 1) > PREFILL_TOKENS or (self._tiles and longest != length)):
                    break
                batch.append(self._state.queue.popleft())
                length = longest
            share -= length * len(batch)
            try:
                self._place(batch, length)
            except Exception:
                admitted = {request.key for request in self._state.table.requests if request is not None}
                self._state.queue.extendleft(request for request in reversed(batch) if request.key not in admitted)
                raise
            tokens = sum(len(self._prefix(request)) for request in batch)
            resumed = self._tiles is None and all(len(request.tokens) for request in batch)
            report.prefills.append(Prefill(len(batch), tokens, resumed))
            report.prefilled += tokens

    def _prefix(self, request: SampleRequest) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Tokens that go through prefill."""
        if self._tiles is None and len(request.tokens):
            return np.concatenate([request.prompt, request.tokens[:-1]])
        return request.prompt[:-1]

    def _place(self, batch: Sequence[SampleRequest], length: int) -> None:
        """Runs the distinct prefixes of `batch`, padded to `length`, and gives every sample a slot and a row."""
        prefixes = [self._prefix(request) for request in batch]
        distinct = {prefix.tobytes(): prefix for prefix in prefixes}
        rows = {content: row for row, content in enumerate(distinct)}
        ids = np.zeros((len(distinct), length), np.int64)
        for row, prefix in enumerate(distinct.values()):
            ids[row, : len(prefix)] = prefix
        sources = np.array([rows[prefix.tobytes()] for prefix in prefixes])
        first = 0
        while first < len(ids):
            count = len(ids) - first
            if self._tiles is not None and length:
                count = self._tiles.prompts(count, length)
            prompts = (
                self._forward.prefill(torch.from_numpy(ids[first : first + count]).to(self._forward.device))
                if length
                else None
            )
            members = np.flatnonzero((sources >= first) & (sources < first + count))
            slots = np.array([self._state.table.add(batch[int(member)], len(prefixes[member])) for member in members])
            self._state.pools.place(slots, self._state.table.position[slots], prompts, sources[members] - first)
            first += count

    # ------------------------------------------------------------ decoding

    def _decode(self, run: DecodePass, report: StepReport) -> None:
        """One pass: feed, sample, record, finish. A paused sample is fed again what it was fed, and nothing is kept."""
        live = ~self._state.table.paused[run.slots]
        if not live.any():
            return
        tokens = np.zeros(run.width, np.int64)
        positions = np.zeros(run.width, np.int64)
        uniform = np.zeros(run.width, np.float64)
        tokens[: len(run.slots)] = self._state.table.next_token[run.slots]
        positions[: len(run.slots)] = self._state.table.position[run.slots]
        if self.parameters.temperature > 0:
            uniform[: len(run.slots)] = self._state.table.uniform(run.slots)
        device = self._forward.device
        logits = self._forward.decode(
            run.pool, run.first, torch.from_numpy(tokens).to(device), torch.from_numpy(positions).to(device), run.length
        )
        drawn, drawn_log_probabilities = sample(logits, torch.from_numpy(uniform).to(device), self.parameters)
        slots = run.slots[live]
        sampled = drawn.cpu().numpy()[: len(run.slots)][live]
        log_probabilities = drawn_log_probabilities.cpu().numpy()[: len(run.slots)][live]
        if not np.isfinite(log_probabilities).all():
            self._refuse(slots[~np.isfinite(log_probabilities)])
        fresh = self._state.table.advance(slots, sampled, log_probabilities, self.version)
        report.rows += len(run.slots)
        report.keys += len(run.slots) * run.length
        report.decoded += int(fresh.sum())
        report.replayed += int((~fresh).sum())
        report.prefilled += int((~fresh).sum())
        self._finish(slots[fresh], sampled[fresh])

    def _finish(self, slots: Slots, sampled: Slots) -> None:
        """Ends the responses that this step's tokens complete."""
        stopped = self._stop.is_stop[sampled]
        if self._stop.has_strings:
            for at in np.flatnonzero(self._stop.may_complete[sampled] & ~stopped):
                stopped[at] = self._stop.ends_with_string(self._state.table.tokens(int(slots[at])))
        ended = stopped | (self._state.table.length[slots] >= self._state.table.limit[slots])
        for slot, stop in zip(slots[ended], stopped[ended], strict=True):
            self._state.complete.append(
                self._state.table.response(int(slot), finish_reason="stop" if stop else "length")
            )
        self._free(slots[ended])

    def _free(self, slots: Slots) -> None:
        if len(slots):
            self._state.pools.drop(slots)
            for slot in slots:
                self._state.table.remove(int(slot))

    def _refuse(self, slots: Slots) -> None:
        """A policy that yields no probabilities must not yield tokens."""
        request = self._state.table.requests[int(slots[0])]
        assert request is not None
        message = (
            f"{sample_name(request.key)}: weight version {self.version} of the actor gives logits that are not finite; "
            "lower spec.training.optimizer.learningRate or go back to an earlier checkpoint"
        )
        raise EngineError("NotFinite", message, "spec.training.optimizer.learningRate")

    def _empty_state(self) -> EngineState:
        return EngineState(ResponseTable(self.limits.max_batch_size), self._empty_pools())

    def _empty_pools(self) -> KvPools:
        largest = padded(self.limits.max_prompt_tokens + self.limits.max_response_tokens)
        if self._tiles is None:
            return SinglePool(self.limits.max_batch_size, largest, self._forward.device)
        return BucketedPools(self.limits.max_batch_size, largest, self._forward.device, self._tiles)


def _require_context(forward: CausalForward, limits: EngineLimits) -> None:
    """WorkError when the longest sequence does not fit the model."""
    longest = limits.max_prompt_tokens + limits.max_response_tokens
    if forward.max_positions is not None and longest > forward.max_positions:
        field = "spec.rollout.maxResponseTokens"
        message = (
            f"{field}: maxPromptTokens {limits.max_prompt_tokens} + maxResponseTokens {limits.max_response_tokens} "
            f"= {longest} is more than the {forward.max_positions} positions of the model"
        )
        raise WorkError("ContextTooShort", message, field=field, exit_code=ExitCode.USAGE)
