"""The draft model on the training ranks: it learns from the policy's logits on the same batch, in step with the policy.

A rank with the policy's last stage holds a whole draft model. Its loss is the cross entropy of its logits to the
policy's, at the positions before the trained response tokens, as a mean over these tokens of the mini-batch. Rule: it
never changes the training of the policy or the critic.
"""

import logging
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from rlhf_api.algorithms import graph_of
from rlhf_api.job import RLHFJobSpec
from rlhf_workers.algorithms.objectives import Statistics
from rlhf_workers.losses.distillation import distillation
from rlhf_workers.models.precision import casting, shared_casts
from rlhf_workers.training.backends.registry import SpanSink
from rlhf_workers.training.batches.training_batch import MicroBatch
from rlhf_workers.training.communication.communicator import Communicator
from rlhf_workers.training.optimizers.optimizer import StageOptimizer
from rlhf_workers.training.parallel.rank_layout import RankLayout
from rlhf_workers.training.schedule.device_timers import timers_for
from rlhf_workers.training.schedule.step_spans import measured
from rlhf_workers.training.stages.pipeline_stage import PipelineStage
from rlhf_workers.training.stages.stage_copy import StageCopy
from rlhf_workers.training.stages.stage_work import Note
from rlhf_workers.training.training_hooks import TrainingHook

log = logging.getLogger(__name__)

SUMS: Final = ("taught", "cross_entropy", "entropy", "agreed")
MAXIMA: Final = ("gradient_norm", "skipped", "seconds", "longest_step", "published_bytes")


@dataclass(frozen=True)
class _Noted:
    """Data of one micro-batch's policy forward for the draft model."""

    stage: PipelineStage
    states: torch.Tensor
    """[n, hidden]: normed states before each trained token, detached."""
    microbatch: MicroBatch


class DraftTraining(TrainingHook):
    """One rank's part. A rank without the policy's last stage holds no draft model and only takes part in metric
    sums."""

    def __init__(
        self,
        spec: RLHFJobSpec,
        stage: PipelineStage | None,
        layout: RankLayout,
        communicator: Communicator,
        device: torch.device,
        compute: torch.dtype,
        span: SpanSink,
    ) -> None:
        """`stage`: the whole draft model, if this rank has the policy's last stage."""
        policy = graph_of(spec).policy
        last = layout.stages(policy) - 1
        self._span = span
        self._communicator, self._holders = communicator, layout.holders(policy, last)
        self._everyone = tuple(range(layout.world))
        self._publishes = stage is not None and layout.publishes(policy, last)
        self.writes = stage is not None and layout.writes(policy, last)
        """Whether this rank saves the draft model."""
        self._device, self._compute, self._temperature = device, compute, spec.rollout.temperature
        draft = spec.generation.speculation.draft_model
        assert draft is not None, "only a job with a draft model trains one"
        self._rate, self._limit = draft.learning_rate, spec.training.optimizer.max_gradient_norm
        self.stage = stage
        offload = spec.training.parallelism.offload_optimizer
        self.optimizer = None if stage is None else StageOptimizer(stage, spec.training.optimizer, offload=offload)
        self._copy = None if stage is None or self.optimizer is None else StageCopy(stage, self.optimizer, device)
        self.steps = 0
        """Optimizer steps of the draft model so far; saved with its moments."""
        self._noted: list[_Noted] = []
        self._marks = timers_for(device)
        self._pending: list[Any] = []
        """Timer marks of the passes of a mini-batch before its step."""
        self._statistics = self._before = Statistics(SUMS, MAXIMA, device)

    def policy_note(self) -> Note:
        """See TrainingHook."""
        return self._keep_states

    def _keep_states(self, stage: PipelineStage, hidden: torch.Tensor, microbatch: MicroBatch) -> None:
        """Record the policy's normed states before trained tokens, from those of a micro-batch, [b, L, hidden]."""
        states = hidden.detach().flatten(0, 1).index_select(0, microbatch.positions)
        self._noted.append(_Noted(stage, states, microbatch))

    def begin(self) -> None:
        """Begin an iteration: reset `metrics`, and drop the remains of a failed one."""
        self._noted.clear()
        if self.optimizer is not None:
            self.optimizer.gradients.zero_()
        self._statistics = Statistics(SUMS, MAXIMA, self._device)

    def backward(self, tokens: int) -> None:
        """Accumulate the gradients of the recorded micro-batches; `tokens`: trained tokens of the mini-batch over all
        ranks."""
        with measured(self._span, "train/draft"):
            if self.stage is not None:
                self._backward(self.stage, tokens)

    def _backward(self, stage: PipelineStage, tokens: int) -> None:
        self._before, self._pending = self._statistics.copy(), [self._marks.mark()]
        with shared_casts(self._device, self._compute):
            for noted in self._noted:
                self._learn(stage, noted, tokens)
        self._noted.clear()
        self._pending.append(self._marks.mark())

    def _learn(self, stage: PipelineStage, noted: _Noted, tokens: int) -> None:
        if not len(noted.states):
            return
        with casting(self._device, self._compute):
            with torch.no_grad():
                taught = noted.stage.logits(noted.states)
            vocabulary = stage.config.vocab_size
            # A padding row that the policy sampled and the draft model lacks is read as its last row.
            embedded, packed = stage.embed(noted.microbatch.tokens.clamp(max=vocabulary - 1)), noted.microbatch.packed
            hidden = (stage(embedded) if packed is None else stage(embedded, packed)).flatten(0, 1)
            logits = stage.logits(hidden.index_select(0, noted.microbatch.positions))
            shared = min(vocabulary, taught.shape[-1])
            outcome = distillation(logits[:, :shared], taught[:, :shared], self._temperature)
        (outcome.cross_entropy.sum() / tokens).backward()
        sums: dict[str, torch.Tensor | float] = {
            "taught": float(len(logits)),
            "cross_entropy": outcome.cross_entropy.detach().double().sum(),
            "entropy": outcome.entropy.double().sum(),
            "agreed": outcome.agrees.double().sum(),
        }
        self._statistics.add(sums, {})

    def forget(self) -> None:
        """Drop the gradients and statistics of a mini-batch that the policy skips."""
        if self.optimizer is not None:
            self.optimizer.gradients.zero_()
            self._statistics, self._pending = self._before, []

    def step(self) -> None:
        """Sum the gradients over the ranks that hold the draft model and take an optimizer step, unless they are not
        finite."""
        with measured(self._span, "train/draft-step"):
            if self.optimizer is not None:
                self._step(self.optimizer)

    def _step(self, optimizer: StageOptimizer) -> None:
        begun = self._marks.mark()
        self._communicator.all_reduce_sum(optimizer.gradients, self._holders)
        norm = float(optimizer.norm_squared()) ** 0.5
        finite = math.isfinite(norm)
        if finite:
            limit = self._limit
            optimizer.step(self._rate, 1.0 if limit is None or norm <= limit else limit / norm)
            self.steps += 1
        else:
            optimizer.gradients.zero_()
            self._statistics = self._before
            log.warning("the gradient of the draft model is %s: its step is skipped, the policy's is not", norm)
        times = self._marks.read([*self._pending, begun, self._marks.mark()])
        seconds = sum(end - start for start, end in zip(times[::2], times[1::2], strict=True)) / 1e9
        numbers = dict(zip(MAXIMA, self._statistics.maxima.tolist(), strict=True))
        numbers["gradient_norm"] = max(numbers["gradient_norm"], norm if finite else 0.0)
        numbers["skipped"] += not finite
        numbers["seconds"] += seconds
        numbers["longest_step"] = max(numbers["longest_step"], seconds)
        numbers["published_bytes"] = float(optimizer.counted * self._compute.itemsize)
        self._statistics.maxima = torch.tensor([numbers[name] for name in MAXIMA], dtype=torch.float64).to(self._device)
        self._pending = []

    def metrics(self, trained: Collection[str], layout: RankLayout) -> dict[str, float]:
        """Return the metrics of the iteration's steps, the same on all ranks, which must all call this.

        `seconds` are those of the slowest rank.
        """
        self._communicator.all_reduce_sum(self._statistics.sums, self._everyone)
        self._communicator.all_reduce_max(self._statistics.maxima, self._everyone)
        sums, maxima = self._statistics.numbers()
        tokens = sums["taught"]
        of_tokens = {} if not tokens else {
            "draft/loss": sums["cross_entropy"] / tokens,
            "draft/divergence": (sums["cross_entropy"] - sums["entropy"]) / tokens,
            "draft/agreement": sums["agreed"] / tokens,
        }  # fmt: skip
        return of_tokens | {
            "draft/gradient_norm_max": maxima["gradient_norm"],
            "draft/skipped_steps": maxima["skipped"],
            "draft/seconds": maxima["seconds"],
            "draft/step_seconds_max": maxima["longest_step"],
            "draft/published_bytes": maxima["published_bytes"],
        }

    def published(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face parameter name, tensor in the compute type) if this rank publishes the policy's last
        stage.
        """
        if self.optimizer is not None and self._publishes:
            for name in self.optimizer.owned:
                yield name, self.optimizer.parameters[name].detach().to(self._compute)

    def offload(self) -> None:
        """Move weights and moments to host memory and free the gradients."""
        if self.optimizer is not None and self._copy is not None:
            self.optimizer.drop_gradients()
            self._copy.offload()

    def onload(self) -> None:
        """Move everything back to the device unchanged."""
        if self.optimizer is not None and self._copy is not None:
            self._copy.onload()
            if not len(self.optimizer.gradients):
                self.optimizer.make_gradients()
