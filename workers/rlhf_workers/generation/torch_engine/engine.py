"""The torch engine: continuous batching for causal language models of transformers that take explicit masks.

Rule: a prefill omits the last known token, which goes through a decode pass, so `Decoding` does all sampling.
"""

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from rlhf_common.samples import FinishReason, ResponsePart, SampleKey, SampleRequest
from rlhf_workers.devices.host_copies import Stopwatch
from rlhf_workers.generation.engine import (
    EngineCosts,
    EngineError,
    EngineLimits,
    SamplingParameters,
    StepReport,
)
from rlhf_workers.generation.requests import check_request, known_response, require_context, sample_name
from rlhf_workers.generation.stopping import StopRule, stop_ids
from rlhf_workers.generation.torch_engine.admission import Admission
from rlhf_workers.generation.torch_engine.buckets import padded
from rlhf_workers.generation.torch_engine.capture import capture_for
from rlhf_workers.generation.torch_engine.decode_costs import measure
from rlhf_workers.generation.torch_engine.decode_pass import PassDecoder, PlainDecoder
from rlhf_workers.generation.torch_engine.decoding import Decoding
from rlhf_workers.generation.torch_engine.drafting import Drafting, ProposesDrafts
from rlhf_workers.generation.torch_engine.engine_state import EngineState
from rlhf_workers.generation.torch_engine.forward import CausalForward
from rlhf_workers.generation.torch_engine.forward_choice import KernelMode, static_forward
from rlhf_workers.generation.torch_engine.kv_moves import TorchKvMoves
from rlhf_workers.generation.torch_engine.kv_pools import BucketedPools, KvPools, PoolSize, SinglePool
from rlhf_workers.generation.torch_engine.response_table import ResponseTable
from rlhf_workers.generation.torch_engine.static_decoder import GraphFigures, StaticDecoder
from rlhf_workers.generation.torch_engine.tiles import Tiles
from rlhf_workers.generation.torch_engine.turn_cache import TurnCache
from rlhf_workers.models.loading import copy_weights, matched_weights
from rlhf_workers.weights.offload import OffloadableWeights
from rlhf_workers.worker_role import NO_VERSION


class TorchEngine:
    """Implements `Engine`, with sleep, cost measurement and moves of KV caches."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        parameters: SamplingParameters,
        limits: EngineLimits,
        *,
        deterministic: bool,
        static_shapes: bool = False,
        fused_kernels: KernelMode = "Disabled",
        speculator: ProposesDrafts | None = None,
        version: int = 0,
        field: str = "spec.models.actor.path",
    ) -> None:
        """`model` is in eval mode on its device. Raises WorkError if it cannot be decoded or, on a CPU, reproduced if
        `deterministic`.

        `static_shapes`: decode passes have few shapes, captured where possible. `fused_kernels`: kernels run several
        steps of the model each. `speculator` drafts tokens.
        """
        self.version = version
        self.parameters = parameters
        self.limits = limits
        self.deterministic = deterministic
        self.device: torch.device = model.device
        self._model = model
        self._weights = OffloadableWeights(model, model.device, frozen=False)
        self._forward = CausalForward(model, field)
        self._forward.verify(sharing=not deterministic)
        self._tiles = Tiles(self._forward) if deterministic else None
        if self._tiles is not None:
            self._tiles.require()
        require_context(self._forward.max_positions, limits)
        self._stop = StopRule(
            tokenizer, self._forward.vocabulary, stop_ids(model, tokenizer, parameters), parameters.stop
        )
        self._admission = Admission(self._forward, self._tiles, limits)
        self._graphs: StaticDecoder | None = None
        self._kept = PoolSize() if static_shapes and not deterministic else None
        capture = capture_for(self.device)
        self._way = static_forward(self._forward, parameters, "Disabled" if deterministic else fused_kernels, capture)
        self._decoder: PassDecoder = PlainDecoder(self._way, parameters)
        if self._kept is not None:
            self._graphs = StaticDecoder(self._way, parameters, limits.max_batch_size, capture)
            self._decoder = self._graphs
        self._state = self._empty_state(self._kept)
        self.speculator = speculator
        """The engine's speculator, also during a cost measurement, which runs without it; None without drafts."""
        self._decoding = self._decoding_by(self._stop, speculator)
        rules = (self._check, self._complete_reason)
        self.moves = TorchKvMoves(self._forward, limits, lambda: self._state, *rules, deterministic=deterministic)

    # ------------------------------------------------------------ Engine

    takes_weights_while_offloaded = True
    """See TakesWeightsWhileOffloaded."""
    takes_drafts_ahead = True
    """See TakesDraftsAhead."""

    @property
    def vocabulary(self) -> int:
        """Return the width of the logits."""
        return self._forward.vocabulary

    @property
    def in_flight(self) -> int:
        """See Engine."""
        return len(self._state.in_flight)

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """See Engine; the next step finishes a sample whose tokens are already complete."""
        new: set[SampleKey] = set()
        for request in requests:
            self._check(request)
            if request.key in self._state.in_flight or request.key in new:
                raise EngineError("DuplicateSample", f"{sample_name(request.key)} is already in this engine")
            new.add(request.key)
        self._state.in_flight |= new
        for request in requests:
            reason = self._complete_reason(request)
            if reason:
                self._state.complete.append(known_response(request, reason))
            else:
                self._state.enqueue(request)

    @torch.inference_mode()
    def step(self) -> StepReport:
        """See Engine."""
        report = StepReport()
        prefill = Stopwatch(self.device)
        prefill.start()
        self._admission.admit(self._state, report)
        prefill.stop()
        self._decoding.step(self._state, self.version, report)
        report.prefill_ns = prefill.read_ns()  # read after the passes, when the device has finished the prefill
        report.fused_passes = report.passes if self.fused else 0
        report.finished, self._state.complete = self._state.complete, []
        self._state.in_flight.difference_update(response.key for response in report.finished)
        return report

    def progress(self) -> list[ResponsePart]:
        """See Engine."""
        return self._state.table.unsent()

    def withdraw(self, keys: Sequence[SampleKey] | None = None) -> list[ResponsePart]:
        """See Engine; a complete response that is not reported counts as finished, unless all are withdrawn."""
        wanted = self._state.in_flight.copy() if keys is None else self._state.in_flight.intersection(keys)
        if keys is not None:
            wanted.difference_update(response.key for response in self._state.complete)
        withdrawn = [response for response in self._state.complete if response.key in wanted]
        self._state.complete = [response for response in self._state.complete if response.key not in wanted]
        queued = (*self._state.queue, *self._state.waiting.values())
        withdrawn += [known_response(request, "") for request in queued if request.key in wanted]
        self._state.queue = deque(request for request in self._state.queue if request.key not in wanted)
        for key in wanted:
            self._state.waiting.pop(key, None)
        slots = [
            slot
            for slot, request in enumerate(self._state.table.requests)
            if request is not None and request.key in wanted
        ]
        withdrawn += [self._state.table.response(slot) for slot in slots]
        self._decoding.drafting.tell(self._state, np.array(slots, np.int64))
        self._decoding.free(self._state, np.array(slots, np.int64))
        self._decoding.drafting.follow(self._state)
        self._state.in_flight -= wanted
        return withdrawn

    def load_weights(self, tensors: Mapping[str, torch.Tensor], version: int) -> int:
        """See Engine."""
        self._forget_turns()
        copies = matched_weights(self._model, tensors, subject=f"actor version {version}")
        self.version = NO_VERSION
        loaded = copy_weights(copies)
        self.version = version
        return loaded

    def sleep(self) -> None:
        """See Sleeps."""
        if self._state.in_flight:
            raise EngineError("EngineBusy", f"{len(self._state.in_flight)} samples must be withdrawn before sleep")
        self._forget_turns()
        if self._graphs is not None:
            self._graphs.drop_graphs()
        self._way.release()
        self._state.pools = self._empty_pools(self._kept)
        self._weights.offload()

    def wake(self) -> None:
        """See Sleeps."""
        self._weights.onload()

    def keep_turns(self) -> None:
        """See KeepsTurns."""
        self._state.turn_cache = TurnCache(self.limits.max_batch_size, replays=self.deterministic)

    def forget_turn(self, key: SampleKey) -> None:
        """See KeepsTurns."""
        if self._state.turn_cache is not None:
            self._state.turn_cache.drop(key)

    def measure(self) -> Generator[None, None, EngineCosts]:
        """See MeasuresCosts."""
        self.wake()
        return measure(self)

    @contextmanager
    def aside(self) -> Iterator[EngineState]:
        """Put samples, stop rule and speculator aside inside, for a cost measurement; restore them afterwards."""
        state, decoding = self._state, self._decoding
        self._state = self._empty_state()
        endless = StopRule(None, self._forward.vocabulary, (), ())
        self._decoding = self._decoding_by(endless, None)
        try:
            yield self._state
        finally:
            self._state, self._decoding = state, decoding

    def draft_by(self, speculator: ProposesDrafts | None) -> None:
        """Set the speculator (or None) for later samples; the engine must have no samples."""
        if self.in_flight:
            raise EngineError(
                "EngineBusy", f"{self.in_flight} samples must be withdrawn before drafts come from elsewhere"
            )
        self.speculator = speculator
        self._decoding = self._decoding_by(self._stop, speculator)

    def kv_bytes(self) -> int:
        """Return the bytes of the KV pools."""
        return self._state.pools.bytes()

    def graph_bytes(self) -> int:
        """Return the device bytes of captured passes and their buffers."""
        return 0 if self._graphs is None else self._graphs.bytes()

    @property
    def fused(self) -> bool:
        """Return whether fused kernels run the passes."""
        return self._way is not self._forward

    @property
    def graphs(self) -> GraphFigures | None:
        """Return statistics of captures; None without static shapes."""
        return None if self._graphs is None else self._graphs.figures

    def _forget_turns(self) -> None:
        if self._state.turn_cache is not None:
            self._state.turn_cache.clear()

    def _check(self, request: SampleRequest) -> None:
        check_request(request, self.limits, self._forward.vocabulary)

    def _complete_reason(self, request: SampleRequest) -> FinishReason:
        return self._stop.complete_reason(request)

    def _decoding_by(self, stop: StopRule, speculator: ProposesDrafts | None) -> Decoding:
        drafting = Drafting(speculator, self._forward.vocabulary)
        return Decoding(self._decoder, self.parameters, stop, self._tiles, drafting)

    def _empty_state(self, retained_size: PoolSize | None = None) -> EngineState:
        return EngineState(ResponseTable(self.limits.max_batch_size), self._empty_pools(retained_size))

    def _empty_pools(self, retained_size: PoolSize | None = None) -> KvPools:
        largest = padded(self.limits.max_prompt_tokens + self.limits.max_response_tokens)
        if self._tiles is None:
            return SinglePool(self.limits.max_batch_size, largest, self._forward.device, retained_size)
        return BucketedPools(self.limits.max_batch_size, largest, self._forward.device, self._tiles)
