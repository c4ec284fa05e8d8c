"""The job of a search: its spec, its models, and batches of response lengths that every plan is compared on.

Rule: pure; all plans see the same drawn lengths. Must never depend on the number of devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy as np

from rlhf_api.algorithms import ModelRole, graph_of, same_prompt_samples, samples_of_batch
from rlhf_api.job import RLHFJobSpec
from rlhf_api.job.devices import SizeGroup
from rlhf_common.names import Group
from rlhf_planner.device_memory import COMPUTE_BYTES, ModelSize, Sizes
from rlhf_planner.inter_stage.length_distribution import Ints
from rlhf_planner.inter_stage.lengths import LengthModel
from rlhf_planner.plan_search.cost_figures import FigureSource
from rlhf_planner.training_flops import LEAST_SHARING_GAIN, training_flops
from rlhf_planner.transformer_shape import TransformerShape

MAX_DRAWS: Final = 4
"""Maximum number of batches that are drawn."""
SAMPLES_DRAWN: Final = 512
"""Approximate maximum of samples in all draws together; at least one batch is drawn."""


class UnplannableError(ValueError):
    """A job for which no plan can be searched, or none fits; the message says why, and what to do."""


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of one model that costs depend on."""

    role: str
    size: ModelSize
    shape: TransformerShape | None = None
    """Shape from config.json; without it, widths are estimated from the number of parameters."""

    @property
    def layers(self) -> int:
        """Number of layers, at least 1."""
        return max(1, self.size.layers)

    @property
    def hidden(self) -> float:
        """Width of the states; without a shape, estimated from the number of parameters."""
        return self.shape.hidden if self.shape else math.sqrt(self.size.parameters / (12 * self.layers))

    @property
    def table_parameters(self) -> int:
        """Parameters of the embedding; 0 without a shape."""
        return self.shape.vocabulary * self.shape.hidden if self.shape else 0

    @property
    def layer_parameters(self) -> float:
        """Mean parameters of one layer."""
        tables = self.table_parameters * (1 if self.shape is None or self.shape.tied else 2)
        return max(0.0, self.size.parameters - tables) / self.layers

    @property
    def active_parameters(self) -> float:
        """Parameters of one layer that a token uses: of experts, only the chosen ones."""
        experts = self.shape.experts if self.shape else None
        if experts is None or not self.size.expert_parameters:
            return self.layer_parameters
        idle = self.size.expert_parameters / self.layers * (1 - experts.chosen / experts.count)
        return max(0.0, self.layer_parameters - idle)

    @property
    def chosen_experts(self) -> int:
        """Experts that a token uses; 0 without experts."""
        return self.shape.experts.chosen if self.shape and self.shape.experts else 0


@dataclass(frozen=True)
class MicroBatchSize:
    """Mean size of a micro-batch over the drawn batches."""

    samples: int
    tokens: float
    """Tokens of all samples, padding included; a shared prompt counts once."""
    squares: float
    """Sum of the squared lengths of the rows that attention works on, padding included; the square of a shared prompt
    counts once."""
    responses: float
    """Response tokens of all samples."""


def assumed_lengths(spec: RLHFJobSpec) -> tuple[LengthModel, list[int]]:
    """Return (model of response lengths, prompt tokens of each sample of a batch) of a job that never ran: prompts are
    half of maxPromptTokens long."""
    rollout = spec.rollout
    prompts = [max(1, rollout.max_prompt_tokens // 2)] * samples_of_batch(spec)
    return LengthModel.prior(rollout.max_response_tokens), prompts


@dataclass(frozen=True)
class Workload:
    """One iteration of a resolved job.

    Raises UnplannableError without generation or generation workers, or for a policy or a trained model of unknown
    size.
    """

    spec: RLHFJobSpec
    sizes: Sizes
    shapes: Mapping[str, TransformerShape]
    """Role -> shape, where its config.json is known."""
    lengths: LengthModel
    prompts: tuple[int, ...]
    """Prompt tokens of each sample of a batch."""
    length_source: FigureSource = FigureSource.ASSUMED
    _micro_batches: dict[int, MicroBatchSize] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        graph = graph_of(self.spec)
        if not graph.generates:
            raise UnplannableError(
                f"algorithm {graph.algorithm} generates nothing, and plans divide devices between generation and "
                "training: use --device-memory without --devices for its training layouts"
            )
        if not self.spec.generation.replicas:
            raise UnplannableError("spec.generation.replicas is 0: set the workers that the job has when it runs")
        missing = [role for role in (graph.policy, *graph.trained) if self.sizes.get(role) is None]
        if missing:
            names = ", ".join(dict.fromkeys(missing))
            raise UnplannableError(f"the models of {names} are not on this disk: give folders, or download them first")

    @property
    def value_bytes(self) -> int:
        """Bytes per number in matrix products."""
        return COMPUTE_BYTES[self.spec.compute_type]

    @property
    def on_gpus(self) -> bool:
        """Whether generation workers use GPUs; otherwise a device is a process."""
        return self.spec.generation.gpus_per_replica > 0

    @property
    def fixed(self) -> frozenset[SizeGroup]:
        """Sizes that every plan leaves as the job has them: those of spec.devices.fixed."""
        return frozenset() if self.spec.devices is None else frozenset(self.spec.devices.fixed)

    @property
    def samples(self) -> int:
        """Number of samples of a batch."""
        return samples_of_batch(self.spec)

    def model(self, role: str) -> ModelFacts:
        """Return the facts of a role whose size is known."""
        size = self.sizes.get(role)
        assert size is not None, f"the size of {role} is unknown"
        return ModelFacts(role, size, self.shapes.get(role))

    @cached_property
    def policy(self) -> ModelFacts:
        """Facts of the policy."""
        return self.model(graph_of(self.spec).policy)

    @cached_property
    def trained(self) -> tuple[ModelRole, ...]:
        """Roles that are trained, in training order."""
        return graph_of(self.spec).trained

    @cached_property
    def scorers(self) -> tuple[ModelFacts, ...]:
        """Facts of the models of known size that score responses."""
        tasks = graph_of(self.spec).tasks_of(Group.INFERENCE)
        roles = dict.fromkeys(task.model for task in tasks)
        return tuple(self.model(role) for role in roles if self.sizes.get(role) is not None)

    @cached_property
    def draws(self) -> tuple[Ints, ...]:
        """Response lengths of each drawn batch, int64 [samples]."""
        count = max(1, min(MAX_DRAWS, SAMPLES_DRAWN // len(self.prompts)))
        generator = np.random.default_rng(self.spec.seed)
        return tuple(self.lengths.draw(generator, self.prompts) for _ in range(count))

    def micro_batch(self, samples: int) -> MicroBatchSize:
        """Return the mean size of a micro-batch of so many samples, taken from the batches in their order."""
        if samples not in self._micro_batches:
            self._micro_batches[samples] = self._measured(samples)
        return self._micro_batches[samples]

    def _measured(self, samples: int) -> MicroBatchSize:
        found = []
        for responses in self.draws:
            whole = np.asarray(self.prompts, dtype=np.float64) + responses
            rows = len(whole) // samples * samples
            by_batch = np.resize(whole, max(samples, rows)).reshape(-1, samples)
            padded = by_batch if self.spec.training.packing else np.broadcast_to(
                by_batch.max(axis=1, keepdims=True), by_batch.shape
            )  # fmt: skip
            found.append((padded.sum(axis=1).mean(), (padded**2).sum(axis=1).mean(), responses.mean() * samples))
        tokens, squares, trained = (float(np.mean(column)) for column in zip(*found, strict=True))
        return self._shared(MicroBatchSize(samples, tokens, squares, trained))

    def _shared(self, size: MicroBatchSize) -> MicroBatchSize:
        """Return the size, with shared prompts counted once if the job's `sharedPrompts` shares them."""
        mode = self.spec.training.shared_prompts
        if mode == "Disabled":
            return size
        same = min(round(same_prompt_samples(self.spec)), size.samples)
        prompts, repeated = np.asarray(self.prompts, dtype=np.float64), size.samples - -(-size.samples // same)
        tokens = size.tokens - repeated * float(prompts.mean())
        squares = size.squares - repeated * float((prompts**2).mean())
        operations = [
            training_flops(self.policy.active_parameters, self.policy.hidden, count, pairs / 2)
            for count, pairs in ((size.tokens, size.squares), (tokens, squares))
        ]
        if mode == "Auto" and operations[0] < LEAST_SHARING_GAIN * operations[1]:
            return size
        return replace(size, tokens=tokens, squares=squares)
