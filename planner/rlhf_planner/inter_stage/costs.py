"""What decoding, prefilling, scoring and moving samples costs on the workers of a job, fitted to a few measured times.

Rule: plain numbers in (`StepTime`), closed formulas out, so that a simulation can sum thousands of steps at once. A
decode step is a line in the context for every batch size; everything else is a setup, so much a sample and so much a
token. Observations correct whole kinds of work by a ratio, the median of the last few iterations' own, never the shape.
Must never answer a negative time.
All times are in seconds, all sizes in bytes.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Transfer = Literal["Auto", "KV", "Tokens"]
Number = TypeVar("Number", float, Floats)
"""One, or one for each of many samples."""
Kind = Literal["decode", "prefill", "score", "transfer"]

JOB_KEY: Final = "interStage"
"""Key of the journal's job.json under which a job keeps {"costs": StageCosts.document()}."""
NEAR_FLAT: Final = 1.25
"""A decode step up to this much longer than with one sample is "near-flat": it sets the saturation batch."""
OBSERVATIONS: Final = 5
"""Iterations whose ratios count: a wrong profile is gone after one, and of five two may be anything."""
LEAST_RATIO, MOST_RATIO = 0.1, 10.0
"""Ratios stay within this: one hung transfer must not turn every forecast into nonsense."""
SCORE_BATCH: Final = 16
"""Samples that a worker scores at a time, unless it is told otherwise: the chunk of a Score command."""


MOVE_STEPS: Final = 5
"""Step boundaries that a move waits for: the offer is taken, the cache is cut, the rest of it too, the sample is
placed, the receipt is read."""
PAUSE_STEPS: Final = 2
"""Of them nobody decodes the sample: until it is placed, until it is in a step again."""
MOVES_AT_ONCE: Final = 4
"""Samples that a worker sends side by side: they wait for the same boundaries."""


class Observed(NamedTuple):
    """Real work: `passes` (decode: steps; transfer: samples) over `batch` samples of `tokens` tokens (decode: keys)
    each took `seconds` in all."""

    kind: Kind
    passes: float
    batch: float
    tokens: float
    seconds: float


class StepTime(NamedTuple):
    """One pass over `batch` samples of `tokens` tokens each (decode: with so many keys each) took `seconds`."""

    batch: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Work:
    """Seconds of one pass: `setup + batch * (per_sample + tokens * per_token)`."""

    setup: float = 0.0
    per_sample: float = 0.0
    per_token: float = 0.0

    @classmethod
    def fitted(cls, times: Iterable[StepTime]) -> Work:
        """Least relative squares over non-negative parts; no times at all: nothing costs anything.

        Raises ValueError for a time that is negative, or not finite.
        """
        rows = _checked(times)
        if not rows:
            return cls()
        features = np.array([[row.batch * row.tokens, row.batch, 1.0] for row in rows])
        per_token, per_sample, setup = _non_negative(features, np.array([row.seconds for row in rows]))
        return cls(setup, per_sample, per_token)

    def seconds(self, batch: float, tokens: float) -> float:
        """Of one pass over `batch` samples of `tokens` tokens each."""
        return self.setup + batch * (self.per_sample + tokens * self.per_token)


@dataclass(frozen=True)
class DecodeLines:
    """Seconds of one decode step: at `batches[i]` samples `base[i] + slope[i] * context`; linear between batches."""

    batches: tuple[int, ...]
    base: tuple[float, ...]
    slope: tuple[float, ...]

    @classmethod
    def fitted(cls, times: Iterable[StepTime]) -> DecodeLines:
        """Slopes are linear in the batch, fitted to all points together; what is left of each batch's own points is its
        base, and a larger batch's is never less: single points are noise on a machine that does other work.

        Raises ValueError without times, or for an impossible one.
        """
        rows = _checked(times)
        if not rows:
            raise ValueError("no decode step was measured: at least one (batch, context, seconds) is needed")
        features = np.array([[1.0, row.batch, row.tokens, row.batch * row.tokens] for row in rows])
        _, _, rise, rise_a_row = _non_negative(features, np.array([row.seconds for row in rows]))
        batches = sorted({row.batch for row in rows})
        left: dict[int, list[float]] = {batch: [] for batch in batches}
        for row in rows:
            left[row.batch].append(row.seconds - (rise + rise_a_row * row.batch) * row.tokens)
        base = _never_falling([max(0.0, float(np.mean(left[batch]))) for batch in batches])
        return cls(tuple(batches), tuple(base), tuple(rise + rise_a_row * batch for batch in batches))

    def tables(self, largest: int) -> tuple[Floats, Floats]:
        """(base, slope) for every batch size 0..largest; beyond the measured ones the last rise goes on."""
        sizes = np.arange(largest + 1, dtype=np.float64)
        return _extended(sizes, self.batches, self.base), _extended(sizes, self.batches, self.slope)


@dataclass(frozen=True)
class StageCosts:
    """All costs of generation and inference on one kind of worker."""

    decode: DecodeLines
    max_batch_size: int
    """Samples that a generation worker decodes at once."""
    prefill: Work = Work()
    score: Work = Work()
    """All scoring tasks of a sample together."""
    score_batch: int = SCORE_BATCH
    """Samples scored in one pass at most; 1 in a deterministic job."""
    wake_seconds: float = 0.0
    """Of a generation worker until it can score: models from host memory, trained weights."""
    kv_bytes_per_token: float = 0.0
    kv_room_bytes: float | None = None
    """For KV caches on one worker; None: not limited."""
    bandwidth: float | None = None
    """Bytes a second from worker to worker; None: not known, and nothing is moved with its KV cache."""
    setup_seconds: float = 0.003
    """Of moving a sample with its KV cache, beside its steps: messages, and once a command a connection."""
    move_steps: float = MOVE_STEPS
    command_seconds: float = 0.005
    """From a decision until workers have acted on it: two messages."""
    replays: bool = False
    """A sample that is resumed from its tokens decodes them again (deterministic jobs)."""
    padded: bool = True
    """A decode step reads as many keys of every sample as the longest one has; False: of each its own."""
    ratios: Mapping[Kind, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    """Observed over fitted seconds of the last iterations, oldest first, by kind of work."""

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
        """From measured times; `tasks` by the name of the scoring task. `others` are further fields of this class.

        Raises ValueError naming what is impossible.
        """
        works = [Work.fitted(times) for times in (tasks or {}).values()]
        score = Work(*(sum(getattr(work, part) for work in works) for part in ("setup", "per_sample", "per_token")))
        return cls(DecodeLines.fitted(decode), max_batch_size, Work.fitted(prefill), score, **others)

    def __post_init__(self) -> None:
        if self.max_batch_size < 1:
            raise ValueError(f"max_batch_size is {self.max_batch_size}, must be at least 1")
        if self.score_batch < 1:
            raise ValueError(f"score_batch is {self.score_batch}, must be at least 1")

    # ---------------------------------------------------------------- times

    @cached_property
    def step_tables(self) -> tuple[Floats, Floats]:
        """(base, slope) of a decode step, by batch size 0..max_batch_size, corrected by what was observed."""
        base, slope = self.decode.tables(self.max_batch_size)
        return base * self._scale("decode"), slope * self._scale("decode")

    def decode_seconds(self, batch: int, context: float) -> float:
        """One decode step of `batch` samples with `context` keys each."""
        base, slope = self.step_tables
        at = min(max(batch, 0), self.max_batch_size)
        return float(base[at] + slope[at] * context) if at else 0.0

    def prefill_seconds(self, prompts: int, tokens: float) -> float:
        """Prefill of so many prompts of so many tokens each."""
        return self._scale("prefill") * self.prefill.seconds(prompts, tokens) if prompts else 0.0

    def score_seconds(self, samples: int, tokens: float) -> float:
        """All scoring tasks of so many samples of so many tokens each, prompt included, in one pass a task."""
        setup, a_sample, a_token = self.score_parts
        return setup + samples * (a_sample + tokens * a_token) if samples else 0.0

    @cached_property
    def score_parts(self) -> tuple[float, float, float]:
        """(a pass, a sample, a token): seconds that add up to a pass of scoring, as observed."""
        scale = self._scale("score")
        return scale * self.score.setup, scale * self.score.per_sample, scale * self.score.per_token

    def kv_seconds(self, tokens: Number) -> Number:
        """Moving a sample of so many tokens with its KV cache, while it is decoded on; infinite when the bandwidth is
        not known."""
        return tokens * self.link_seconds + self.move_seconds

    @cached_property
    def link_seconds(self) -> float:
        """Sending the keys and values of one token."""
        return self._scale("transfer") * self.kv_bytes_per_token / self.bandwidth if self.bandwidth else float("inf")

    @cached_property
    def move_seconds(self) -> float:
        """Of a move, beside sending: both workers act between two steps."""
        return self._scale("transfer") * (self.setup_seconds + self.move_steps * self.decode_seconds(1, 0))

    @cached_property
    def pause_seconds(self) -> float:
        """Of a move with the KV cache: nobody decodes the sample."""
        return self._scale("transfer") * (
            self.setup_seconds + min(PAUSE_STEPS, self.move_steps) * self.decode_seconds(1, 0)
        )

    def rebuild_seconds(self, prompt: Number, tokens: Number, batch: int) -> Number:
        """Giving a sample back and building its cache anew on a worker that decodes `batch` samples then."""
        scale, work = self._scale("prefill"), self.prefill
        fixed = scale * (work.setup + work.per_sample) + self.command_seconds + self.decode_seconds(batch, 0)
        if not self.replays:
            return (prompt + tokens) * (scale * work.per_token) + fixed
        base, slope = (float(table[min(batch, self.max_batch_size)]) for table in self.step_tables)
        return prompt * (scale * work.per_token) + fixed + tokens * ((prompt + tokens / 2) * slope + base)

    # ---------------------------------------------------------------- limits

    @cached_property
    def saturation_batch(self) -> int:
        """BS_max: the largest batch whose decode step is at most NEAR_FLAT times that of a single sample."""
        base, slope = self.step_tables
        context = 512.0  # keys; the shape over the batch hardly depends on it
        steps = base[1:] + slope[1:] * context
        return max(1, int((steps <= NEAR_FLAT * steps[0]).cumprod().sum()))

    def least_pool(self, unfinished: int, longest: int) -> int:
        """Workers that can hold so many samples of up to `longest` tokens: by rows and by KV memory."""
        by_rows = -(-unfinished // self.max_batch_size)
        return max(1, by_rows, -(-unfinished // max(1, self.kv_rows(longest))))

    def kv_rows(self, longest: int) -> int:
        """Samples of `longest` tokens whose KV caches one worker has room for; at least 1: it was started with it."""
        if self.kv_room_bytes is None or self.kv_bytes_per_token <= 0:
            return self.max_batch_size
        return max(1, int(self.kv_room_bytes // (self.kv_bytes_per_token * max(1, longest))))

    # ---------------------------------------------------------------- corrections

    def refined(self, observed: Iterable[Observed]) -> StageCosts:
        """These costs after one more iteration's work; kinds of which nothing was seen stay as they are."""
        fitted, seconds = dataclasses.replace(self, ratios={}), dict[Kind, tuple[float, float]]()
        for one in observed:
            forecast, measured = seconds.get(one.kind, (0.0, 0.0))
            seconds[one.kind] = (forecast + fitted._forecast(one), measured + one.seconds)
        ratios = dict(self.ratios)
        for kind, (forecast, measured) in seconds.items():
            if forecast > 0 and measured > 0:
                ratio = min(MOST_RATIO, max(LEAST_RATIO, measured / forecast))
                ratios[kind] = (*ratios.get(kind, ()), ratio)[-OBSERVATIONS:]
        return dataclasses.replace(self, ratios=ratios)

    def _forecast(self, work: Observed) -> float:
        """Seconds of this work by these costs."""
        match work.kind:
            case "decode":
                return work.passes * self.decode_seconds(max(1, round(work.batch)), work.tokens)
            case "prefill":
                return work.passes * self.prefill_seconds(round(work.batch), work.tokens)
            case "score":
                setup, a_sample, a_token = self.score_parts
                return work.passes * (setup + work.batch * (a_sample + work.tokens * a_token))
            case "transfer":
                return (
                    work.passes * work.tokens * self.link_seconds + -(-work.passes // MOVES_AT_ONCE) * self.move_seconds
                )

    @cached_property
    def scale(self) -> Mapping[Kind, float]:
        """Observed over fitted seconds, by kind of work."""
        return {kind: statistics.median(ratios) for kind, ratios in self.ratios.items()}

    def _scale(self, kind: Kind) -> float:
        return self.scale.get(kind, 1.0)

    # ---------------------------------------------------------------- on disk

    def document(self) -> dict[str, Any]:
        """Plain data for JSON; `from_document` reads it back."""
        return {**dataclasses.asdict(self), "ratios": dict(self.ratios)}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> StageCosts:
        """Raises ValueError, naming it, for a field that is missing or unknown."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(document) - known)
        if unknown:
            raise ValueError(f"costs: unknown field {unknown[0]}")
        try:
            lines = {name: tuple(values) for name, values in document["decode"].items()}
            parts = {name: Work(**document[name]) for name in ("prefill", "score")}
            ratios = {kind: tuple(values) for kind, values in document.get("ratios", {}).items()}
            return cls(**{**document, "decode": DecodeLines(**lines), **parts, "ratios": ratios})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"costs: {error}") from error


def _checked(times: Iterable[StepTime]) -> list[StepTime]:
    rows = [StepTime(*row) for row in times]
    for row in rows:
        if row.batch < 1 or row.tokens < 0 or not 0 <= row.seconds < float("inf"):
            raise ValueError(f"measured time {row} is impossible: batch >= 1, tokens >= 0, finite seconds >= 0 are not")
    return rows


def _non_negative(features: Floats, seconds: Floats) -> tuple[float, ...]:
    """Non-negative least squares by trying every subset of the (at most four) columns; errors count relative.

    Where data cannot tell them apart, few columns are better than many, and the first better than the last.
    """
    columns = features.shape[1]
    weight = 1.0 / np.maximum(seconds, 1e-9)
    best, least = np.zeros(columns), float("inf")
    for subset in sorted(range(1, 1 << columns), key=int.bit_count):
        chosen = [column for column in range(columns) if subset >> column & 1]
        if len(chosen) > len(seconds):
            continue
        part = features[:, chosen]
        found = np.linalg.lstsq(part * weight[:, None], seconds * weight, rcond=None)[0]
        if (found < 0).any():
            continue
        error = float(np.sum(((part @ found - seconds) * weight) ** 2))
        if error < least - 1e-12:
            least, best = error, np.zeros(columns)
            best[chosen] = found
    return tuple(float(value) for value in best)


def _never_falling(values: Sequence[float]) -> list[float]:
    """The nearest values, in squares, of which none is less than the one before (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, more = pools.pop()
            mean, count = (before * more + mean * count) / (more + count), more + count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def _extended(at: Floats, known: Sequence[int], values: Sequence[float]) -> Floats:
    answer = np.interp(at, known, values)
    if len(known) > 1:
        rise = max(0.0, (values[-1] - values[-2]) / (known[-1] - known[-2]))
        beyond = at > known[-1]
        answer[beyond] = values[-1] + rise * (at[beyond] - known[-1])
    return np.asarray(answer, dtype=np.float64)
