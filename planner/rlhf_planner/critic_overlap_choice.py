"""Decides from measurements whether an iteration trains its critics beside the next decoding. Rule: pure."""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, NamedTuple, TypeVar

from rlhf_common.json_numbers import finite_number
from rlhf_planner.critic_overlap import OverlapTimes, overlapped, unchanged

WINDOW: Final = 3
"""Maximum number of measurements that are remembered for each part."""
MARGIN: Final = 0.02
"""Gain above which a replay starts the overlap, as a share of the iteration with the overlap. Without a gain it stops.
"""
REMEASURE: Final = 50
"""Iterations after which the unused way is measured again."""


class TrainedPart(NamedTuple):
    """Measured training time of models on one batch."""

    tokens: float
    """Prompt and response tokens of the batch."""
    seconds: float


_Parts = tuple[TrainedPart, ...]
_Measured = TypeVar("_Measured")


@dataclass(frozen=True, slots=True)
class MeasuredOverlap:
    """Measurements of both ways. Each window has at most WINDOW measurements, newest last."""

    together: _Parts = ()
    """Training of all models together."""
    policy: _Parts = ()
    """Training of the policy only."""
    critics: _Parts = ()
    """Training of the other models during decoding."""
    quiet: tuple[float, ...] = ()
    """Mean seconds of a decode step, one value per iteration without concurrent critic training."""
    beside: tuple[float, ...] = ()
    """Mean seconds of a decode step, one value per iteration with concurrent critic training."""
    apart: float = 0.0
    """`OverlapTimes.apart` of the last iteration that did not wait for critics."""
    latency: float = 0.0
    late_share: float = 1.0
    together_age: int = 0
    """Iterations since joint training was last measured; until the first measurement, all iterations."""
    apart_age: int = 0
    """Iterations since separate critic training was last measured; until the first measurement, all iterations."""

    def with_together(self, tokens: float, seconds: float) -> "MeasuredOverlap":
        """Return a copy with an iteration that trained all models together."""
        return replace(self, together=_added(self.together, TrainedPart(tokens, seconds)), together_age=0)

    def with_parts(self, tokens: float, policy: float, critics: float) -> "MeasuredOverlap":
        """Return a copy with an iteration that trained its critics apart. `policy` and `critics` are seconds."""
        parts = TrainedPart(tokens, policy), TrainedPart(tokens, critics)
        return replace(self, policy=_added(self.policy, parts[0]), critics=_added(self.critics, parts[1]), apart_age=0)

    def with_step(self, seconds: float, *, beside: bool) -> "MeasuredOverlap":
        """Return a copy with the mean decode step of an iteration. `beside`: critics were trained at the same time."""
        if beside:
            return replace(self, beside=_added(self.beside, seconds))
        return replace(self, quiet=_added(self.quiet, seconds))

    def with_scoring(self, apart: float, latency: float, late_share: float) -> "MeasuredOverlap":
        """Return a copy with the scoring times of an iteration that did not wait for critics, as in OverlapTimes."""
        return replace(self, apart=apart, latency=latency, late_share=late_share)

    def older(self) -> "MeasuredOverlap":
        """Return a copy that is one iteration older."""
        return replace(self, together_age=self.together_age + 1, apart_age=self.apart_age + 1)

    @property
    def contention(self) -> float:
        """Return the slowdown of decode steps beside critic training, at least 1; 1 with fewer than two measurements of
        a kind.
        """
        if min(len(self.quiet), len(self.beside)) < 2:
            return 1.0
        return max(1.0, min(self.beside) / min(self.quiet))

    def training(self, tokens: float) -> tuple[float, float, float]:
        """Return the seconds for training a batch of `tokens` tokens: together, policy only, others only.

        Each must have been measured.
        """
        windows = self.together, self.policy, self.critics
        rates = [[part.seconds / part.tokens for part in window] for window in windows]
        whole = [[part.seconds for part in window] for window in windows]
        if _scatter(rates) <= _scatter(whole):
            together, policy, critics = (tokens * statistics.median(window) for window in rates)
        else:
            together, policy, critics = (statistics.median(window) for window in whole)
        return together, policy, critics

    def document(self) -> dict[str, Any]:
        """Return the measurements as plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "MeasuredOverlap":
        """Return the measurements that `document` wrote. Raises ValueError for an impossible document."""
        try:
            together, policy, critics = (tuple(map(_part, document[name][:WINDOW])) for name in _PARTS)
            quiet, beside = (tuple(map(_number, document[name][:WINDOW])) for name in ("quiet", "beside"))
            apart, latency, late_share = (_number(document[name]) for name in ("apart", "latency", "late_share"))
            ages = (int(_number(document[name])) for name in ("together_age", "apart_age"))
            return cls(together, policy, critics, quiet, beside, apart, latency, late_share, *ages)
        except (KeyError, TypeError) as error:
            raise ValueError(f"measurements of the critics' overlap: {error}") from error


_PARTS: Final = ("together", "policy", "critics")


@dataclass(frozen=True, slots=True)
class SeenIteration:
    """Facts of an iteration that a replay needs; its times are in seconds."""

    tokens: int
    """Prompt and response tokens that were trained on."""
    publishing: float
    finished: tuple[float, ...]
    """Seconds from the first lease until each response could be scored."""
    beside: bool
    """Whether critics were trained while the iteration was decoded."""


@dataclass(frozen=True, slots=True)
class OverlapChoice:
    """Whether an iteration trains its critics apart, and why."""

    apart: bool
    kind: Literal["measure", "probe", "again", "faster", "kept"]
    """Reason for the choice: a measurement of training together, the first one of training apart, a repeated one, the
    replay, or no new information.
    """
    unchanged: float = 0.0
    """Seconds of an iteration that trains all models together, from the replay; 0 without a replay."""
    overlapped: float = 0.0
    """Seconds of an iteration that trains critics apart, from the replay; 0 without a replay."""

    @property
    def reason(self) -> str:
        """Return the choice as a sentence."""
        way = "trained beside the next decoding" if self.apart else "trained with the policy"
        if self.kind == "probe":
            return f"critics are {way} once, to measure it"
        if self.kind == "measure":
            return f"critics are {way}, to measure it"
        if self.kind == "again":
            return f"critics are {way} once, to measure it again"
        if self.kind == "kept":
            return f"critics are {way} as before: the last iteration was not measured completely"
        return (
            f"critics are {way}: the last iteration would take {self.overlapped:.3g} s with the overlap and "
            f"{self.unchanged:.3g} s without"
        )


def choose(measured: MeasuredOverlap, last: SeenIteration | None, *, apart: bool, pending: bool) -> OverlapChoice:
    """Return the choice for the next iteration.

    `apart` is the last result of the comparison. `pending`: critics of the previous iteration are not trained yet.
    """
    if not measured.together:
        return OverlapChoice(False, "measure")
    if not measured.policy:
        return OverlapChoice(not pending, "measure" if pending else "probe")
    due = measured.together_age >= REMEASURE if apart else measured.apart_age >= REMEASURE and not pending
    if due:
        return OverlapChoice(not apart, "again")
    if last is None or not last.finished or last.tokens <= 0:
        return OverlapChoice(apart, "kept")
    off, on = predicted(measured, last)
    wins = on < off if apart else on * (1 + MARGIN) < off
    return OverlapChoice(wins, "faster", off, on)


def predicted(measured: MeasuredOverlap, last: SeenIteration) -> tuple[float, float]:
    """Return the steady-state seconds of the last iteration without and with the overlap.

    Both ways must have been measured.
    """
    slower = measured.contention
    still = tuple(moment / slower for moment in last.finished) if last.beside else last.finished
    times = OverlapTimes(
        *measured.training(last.tokens),
        last.publishing,
        still,
        measured.apart,
        measured.latency,
        measured.late_share,
    )
    return unchanged(times), overlapped(replace(times, finished=tuple(moment * slower for moment in still)))


def _added(window: tuple[_Measured, ...], value: _Measured) -> tuple[_Measured, ...]:
    return (*window, value)[-WINDOW:]


def _scatter(windows: Iterable[list[float]]) -> float:
    """Return the scatter of repeated measurements: the sum of squared deviations of their logarithms."""
    return sum(len(window) * statistics.pvariance(map(math.log, window)) for window in windows if len(window) > 1)


def _part(pair: Any) -> TrainedPart:
    tokens, seconds = map(_number, pair)
    if not tokens or not seconds:
        raise ValueError(f"measurements of the critics' overlap: {pair!r} is not a training time")
    return TrainedPart(tokens, seconds)


def _number(value: Any) -> float:
    number = finite_number(value)
    if number is None or number < 0:
        raise ValueError(f"measurements of the critics' overlap: {value!r:.100} is not a time")
    return number
