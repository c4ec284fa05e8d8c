"""Costs of decoding, prefilling, scoring and moving samples on the workers of a job, in seconds and bytes.

Must never return a negative time.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from rlhf_api.job import RLHFJobSpec
from rlhf_common.json_numbers import finite_number
from rlhf_planner.inter_stage.fitted_costs import NO_COST, DecodeLines, Floats, PassFormula, StepTime
from rlhf_planner.inter_stage.observed_moves import (
    MOVE_STEPS,
    MoveLine,
    ObservedMove,
    assumed_lines,
    fit_move_line,
)
from rlhf_planner.inter_stage.observed_steps import ObservedStep, RefittedSteps, refit_steps
from rlhf_planner.speculation.forecast import NO_SPECULATION, SpeculationForecast

Transfer = Literal["Auto", "KV", "Tokens"]
Number = TypeVar("Number", float, Floats)
"""One value, or one value for each of many samples."""
Flags = npt.NDArray[np.bool_]
Kind = Literal["decode", "rebuild", "score", "transfer", "pause", "command"]

JOB_KEY: Final = "interStage"
"""Key in the journal's job.json for {"costs": StageCosts.document()}."""
NEAR_FLAT: Final = 1.25
"""Largest ratio of a token's time in a batch to that in a batch of one that counts as "near-flat". Sets the saturation
batch.
"""
SCORE_BATCH: Final = 16
"""Default maximum of samples that a worker scores in one pass."""
LEASE_COMMANDS: Final = 0.5
"""Cost of leasing a sample again, in commands with their replies."""
MOVES_AT_ONCE: Final = 4
"""Samples that count as sent at the same time by a worker. They share the wait for step boundaries."""


def score_batch_of(spec: RLHFJobSpec) -> int:
    """Return the maximum samples that a worker of a job scores in one pass: 1 in a deterministic job."""
    return 1 if spec.deterministic else SCORE_BATCH


@dataclass(frozen=True)
class StageCosts:
    """Costs of generation and inference on one kind of worker."""

    decode: DecodeLines
    max_batch_size: int
    """Maximum samples that a generation worker decodes at once."""
    prefill: PassFormula = NO_COST
    score: PassFormula = NO_COST
    """Cost of all scoring tasks of a sample together."""
    score_batch: int = SCORE_BATCH
    """Maximum samples scored in one pass."""
    wake_seconds: float = 0.0
    """Seconds until a released generation worker can score, for example to load models from host memory."""
    kv_bytes_per_token: float = 0.0
    kv_room_bytes: float | None = None
    """Bytes for KV caches on one worker; None means unlimited."""
    bandwidth: float | None = None
    """Bytes per second between workers; None means unknown, and samples move without their KV cache."""
    setup_seconds: float = 0.003
    """Seconds to set up a move with a KV cache, in addition to its steps: messages, and a connection for each command.
    """
    move_steps: float = MOVE_STEPS
    command_seconds: float = 0.005
    """Seconds from a decision until workers have acted on it: two messages."""
    replays: bool = False
    """Whether a worker decodes the known tokens of a resumed sample again (`RLHFJobSpec.replays_tokens`)."""
    padded: bool = True
    """Whether a decode step reads as many keys for every sample as for the longest one."""
    ratios: Mapping[Kind, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    """Kind of work except decoding -> observed divided by profiled seconds of the last iterations, oldest first."""
    steps: tuple[tuple[ObservedStep, ...], ...] = ()
    """Observed decode steps of the last iterations, oldest first."""
    moves: tuple[tuple[ObservedMove, ...], ...] = ()
    """Observed moves with KV caches of the last iterations, oldest first."""
    speculation: SpeculationForecast = NO_SPECULATION
    """Tokens and seconds of steps with drafts relative to plain steps."""

    @classmethod
    def measured(
        cls,
        *,
        decode: Iterable[StepTime],
        max_batch_size: int,
        prefill: Iterable[StepTime] = (),
        tasks: Mapping[str, Sequence[StepTime]] | None = None,
        **others: Any,
    ) -> StageCosts:
        """Return costs fitted to measured times. `tasks` maps a scoring task to its times.

        Raises ValueError for an impossible time or batch size, or without decode times.
        """
        works = [PassFormula.fitted(times) for times in (tasks or {}).values()]
        score = PassFormula(
            *(sum(getattr(work, part) for work in works) for part in ("setup", "per_sample", "per_token"))
        )
        return cls(DecodeLines.fitted(decode), max_batch_size, PassFormula.fitted(prefill), score, **others)

    def __post_init__(self) -> None:
        if self.max_batch_size < 1:
            raise ValueError(f"max_batch_size is {self.max_batch_size}, must be at least 1")
        if self.score_batch < 1:
            raise ValueError(f"score_batch is {self.score_batch}, must be at least 1")

    # ---------------------------------------------------------------- times

    @cached_property
    def step_tables(self) -> tuple[Floats, Floats]:
        """(base, slope) of a decode step without drafts, refitted to the observed steps: seconds, and seconds per key.

        Each is float64 [max_batch_size + 1] by batch size.
        """
        return self._observed_steps.lines.tables(self.max_batch_size)

    @cached_property
    def token_tables(self) -> tuple[Floats, Floats]:
        """(base, slope) of one token of every sample, by batch size. With drafts a step may generate several tokens."""
        if not self.speculation:
            return self.step_tables
        tokens, cost = self._speculation_factors
        base, slope = self.step_tables
        return base * (cost / tokens), slope * (cost / tokens)

    @cached_property
    def _speculation_factors(self) -> tuple[Floats, Floats]:
        """(tokens per step, seconds relative to a plain step), by batch size."""
        return self.speculation.factors(np.arange(self.max_batch_size + 1, dtype=np.float64))

    @cached_property
    def contention_ratio(self) -> float:
        """Ratio, at least 1, of a decode step while another generation worker scores to one without."""
        return self._observed_steps.contention_ratio

    @cached_property
    def _observed_steps(self) -> RefittedSteps:
        return refit_steps(self.decode, self.steps)

    @cached_property
    def _profile_tables(self) -> tuple[Floats, Floats]:
        """(base, slope) of a profiled decode step, by batch size."""
        return self.decode.tables(self.max_batch_size)

    def decode_seconds(self, batch: int, context: float) -> float:
        """Return the seconds of one decode step of `batch` samples with `context` keys each, without drafts."""
        base, slope = self.step_tables
        at = min(max(batch, 0), self.max_batch_size)
        return float(base[at] + slope[at] * context) if at else 0.0

    def token_seconds(self, batch: int, context: float) -> float:
        """Return the seconds for one token of each of `batch` samples with `context` keys each, including drafts."""
        base, slope = self.token_tables
        at = min(max(batch, 0), self.max_batch_size)
        return float(base[at] + slope[at] * context) if at else 0.0

    def step_seconds(self, batch: int, context: float) -> float:
        """Return the seconds of one step of `batch` samples with `context` keys each, including drafts."""
        plain = self.decode_seconds(batch, context)
        if not self.speculation:
            return plain
        return plain * float(self._speculation_factors[1][min(max(batch, 0), self.max_batch_size)])

    def prefill_seconds(self, prompts: int, tokens: float) -> float:
        """Return the seconds of a prefill of `prompts` prompts of `tokens` tokens each."""
        return self.prefill.seconds(prompts, tokens) if prompts else 0.0

    def resume_seconds(self, samples: int, tokens: float) -> float:
        """Return the seconds of a prefill of samples that resume from their tokens, `tokens` each."""
        scale = 1.0 if self.replays else self._scale("rebuild")
        return scale * self.prefill_seconds(samples, tokens)

    def score_seconds(self, samples: int, tokens: float) -> float:
        """Return the seconds of all scoring tasks of `samples` samples of `tokens` tokens each, in one pass per task.

        `tokens` includes the prompt.
        """
        setup, a_sample, a_token = self.score_parts
        return setup + samples * (a_sample + tokens * a_token) if samples else 0.0

    @cached_property
    def score_parts(self) -> tuple[float, float, float]:
        """Seconds (per pass, per sample, per token) that add up to a scoring pass, corrected by observations."""
        scale = self._scale("score")
        return scale * self.score.setup, scale * self.score.per_sample, scale * self.score.per_token

    @cached_property
    def acknowledged_seconds(self) -> float:
        """Seconds from a decision until a worker has acted on it and acknowledged it."""
        return self._scale("command") * self.command_seconds

    def backlog_seconds(self, samples: int, tokens: float) -> float:
        """Return the seconds of scoring `samples` samples of `tokens` tokens in total, in the largest possible
        passes."""
        setup, a_sample, a_token = self.score_parts
        return -(-samples // self.score_batch) * setup + samples * a_sample + tokens * a_token

    def kv_seconds(self, tokens: Number) -> Number:
        """Return the seconds of moving a sample of `tokens` tokens with its KV cache while it is decoded.

        Infinite if the bandwidth is unknown, for 0 tokens too.
        """
        if not self.bandwidth:
            return tokens * 0.0 + float("inf")
        return tokens * self.link_seconds + self.move_seconds

    @property
    def link_seconds(self) -> float:
        """Seconds for sending the keys and values of one token."""
        return self._moves[0].per_token

    @property
    def move_seconds(self) -> float:
        """Seconds of a move without sending: both workers act between two steps."""
        return self._moves[0].fixed

    def pause_seconds(self, tokens: Number) -> Number:
        """Return the seconds of a move with its KV cache in which no worker decodes the sample."""
        fixed, per_token = self._moves[1]
        return tokens * per_token + fixed

    @cached_property
    def _moves(self) -> tuple[MoveLine, MoveLine]:
        """Lines of (a whole move, its pause): as observed, otherwise from decode steps and the assumed bandwidth."""
        if not self.bandwidth:
            return MoveLine(self.setup_seconds, float("inf")), MoveLine(self.setup_seconds, 0.0)
        sent = self.kv_bytes_per_token / self.bandwidth
        whole, pause = assumed_lines(self.setup_seconds, self.step_seconds(1, 0), sent, self.move_steps)
        observed = [move for iteration in self.moves for move in iteration]
        return (
            fit_move_line(whole, [move for move in observed if not move.paused]),
            fit_move_line(pause, [move for move in observed if move.paused]),
        )

    def kv_cost(self, tokens: Number, share: float) -> Number:
        """Return the seconds that moving a sample of `tokens` tokens with its KV cache costs an iteration.

        The pause counts in full, the rest of the move by `share`, 0..1. Infinite if the bandwidth is unknown.
        """
        if not self.bandwidth:
            return self.kv_seconds(tokens)
        return self.kv_seconds(tokens) * share + (1 - share) * self.pause_seconds(tokens)

    def rebuild_seconds(self, prompt: Number, tokens: Number, batch: int) -> Number:
        """Return the seconds of returning a sample and rebuilding its cache on a worker that then decodes `batch`
        samples."""
        work, context, rows = self.prefill, prompt + tokens, min(batch, self.max_batch_size)
        cost = float(self._speculation_factors[1][rows]) if self.speculation else 1.0
        base, slope = (cost * float(table[rows]) for table in self.step_tables)
        then = context * slope + base + (1 + LEASE_COMMANDS) * self.acknowledged_seconds
        if not self.replays:
            scale = self._scale("rebuild")
            return context * (scale * work.per_token) + scale * (work.setup + work.per_sample) + then
        base, slope = self._step(batch, self._scale("rebuild", self._scale("decode")))
        again = tokens * ((prompt + tokens / 2) * slope + base)
        return prompt * work.per_token + (work.setup + work.per_sample) + again + then

    def _step(self, batch: int, scale: float) -> tuple[float, float]:
        """Return (base, slope) of a decode step: the profile multiplied by `scale`."""
        base, slope = (float(table[min(batch, self.max_batch_size)]) for table in self._profile_tables)
        return scale * base, scale * slope

    def takes_cache(self, prompt: Floats, tokens: Floats, batch: int, share: float, transfer: Transfer) -> Flags:
        """Return which samples move with their KV caches, bool [k]; `prompt` and `tokens` are float64 [k].

        Mode Auto compares `kv_cost` with `rebuild_seconds`.
        """
        if transfer == "Tokens" or not self.bandwidth:
            return np.zeros(len(tokens), dtype=np.bool_)
        cheaper: Flags = self.kv_cost(prompt + tokens, share) < self.rebuild_seconds(prompt, tokens, batch)
        return (tokens > 0) & (cheaper | (transfer == "KV"))

    # ---------------------------------------------------------------- limits

    @cached_property
    def saturation_batch(self) -> int:
        """BS_max: the largest batch up to which a token takes at most NEAR_FLAT times as long as in a batch of one, at
        512 keys."""
        base, slope = self.token_tables
        context = 512.0  # keys
        steps = base[1:] + slope[1:] * context
        return max(1, int((steps <= NEAR_FLAT * steps[0]).cumprod().sum()))

    def least_pool(self, unfinished: int, longest: int) -> int:
        """Return the fewest workers that can hold `unfinished` samples of up to `longest` tokens, by rows and KV
        memory.
        """
        by_rows = -(-unfinished // self.max_batch_size)
        return max(1, by_rows, -(-unfinished // max(1, self.kv_rows(longest))))

    def kv_rows(self, longest: int) -> int:
        """Return how many samples of `longest` tokens fit into one worker's KV pool.

        At least 1; max_batch_size where the memory is unlimited or a token needs none.
        """
        if self.kv_room_bytes is None or self.kv_bytes_per_token <= 0:
            return self.max_batch_size
        return max(1, int(self.kv_room_bytes // (self.kv_bytes_per_token * max(1, longest))))

    @cached_property
    def scale(self) -> Mapping[Kind, float]:
        """Kind of work -> observed divided by profiled seconds, for kinds that were observed."""
        scale = {kind: statistics.median(ratios) for kind, ratios in self.ratios.items()}
        return scale | {"decode": self._observed_steps.level} if self.steps else scale

    def _scale(self, kind: Kind, otherwise: float = 1.0) -> float:
        return self.scale.get(kind, otherwise)

    # ---------------------------------------------------------------- on disk

    def document(self) -> dict[str, Any]:
        """Return the costs as plain data for JSON, for `from_document`."""
        return {**dataclasses.asdict(self), "ratios": dict(self.ratios), "speculation": self.speculation.document()}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> StageCosts:
        """Return the costs that `document` wrote.

        Raises ValueError for an unknown field, without a required field, or for a value that is no finite number.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(document) - names)
        if unknown:
            raise ValueError(f"costs: unknown field {unknown[0]}")
        for name, value in document.items():
            if value is not None or name not in ("bandwidth", "kv_room_bytes"):
                _check_numbers(name, value)
        try:
            steps = tuple(tuple(ObservedStep(*row) for row in iteration) for iteration in document.get("steps", ()))
            moves = tuple(tuple(ObservedMove(*row) for row in iteration) for iteration in document.get("moves", ()))
            lines = {name: tuple(values) for name, values in document["decode"].items()}
            parts = {name: PassFormula(**document[name]) for name in ("prefill", "score")}
            ratios = {kind: tuple(values) for kind, values in document.get("ratios", {}).items()}
            speculation = SpeculationForecast.from_document(document.get("speculation", NO_SPECULATION.document()))
            observed = {"ratios": ratios, "steps": steps, "moves": moves, "speculation": speculation}
            return cls(**{**document, "decode": DecodeLines(**lines), **parts, **observed})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"costs: {error}") from error


def _check_numbers(field: str, value: object) -> None:
    """Raise ValueError unless a JSON value has only finite numbers and bools, in lists and objects of any depth."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            _check_numbers(f"{field}.{name}", part)
    elif isinstance(value, list | tuple):
        for part in value:
            _check_numbers(field, part)
    elif not isinstance(value, bool) and finite_number(value) is None:
        raise ValueError(f"costs: {field} is {value!r:.100}, must be a finite number")
