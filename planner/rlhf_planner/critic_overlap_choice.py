"""Whether an iteration's critics are trained beside the next decoding, by what the job measured of both ways.

  nothing measured   all models at once, which is measured     at once measured   apart for one iteration, a probe
  both measured      what a replay of the last iteration says is faster, with a margin for beginning to overlap
The way that is not in use is measured again every REMEASURE iterations. Training counts by the token, as batches differ
in length, unless what was measured scatters less by the iteration. Decoding counts by the step: where processes share a
machine, critics that train slow it down, and what was seen of that is in the replay.
Rule: pure; whatever is chosen changes when critics are trained, never to what. Without a whole observation of the last
iteration the choice stays as it is.
"""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, NamedTuple, TypeVar

from rlhf_planner.critic_overlap import OverlapTimes, overlapped, unchanged

WINDOW: Final = 3
"""Measurements that are kept of each part; the median counts."""
MARGIN: Final = 0.02
"""Share of an iteration that the overlap must gain to begin; it ends when it gains nothing."""
REMEASURE: Final = 50
"""Iterations after which the other way is tried again: it costs a fiftieth of what it is slower."""


class TrainedPart(NamedTuple):
    """How long models were trained on a batch."""

    tokens: float
    """Of the batch, prompts and responses."""
    seconds: float


_Parts = tuple[TrainedPart, ...]
_Measured = TypeVar("_Measured")


@dataclass(frozen=True, slots=True)
class MeasuredOverlap:
    """What is known of both ways. Windows hold WINDOW measurements at most, newest last."""

    together: _Parts = ()
    """Training of all models at once, by the table in force."""
    policy: _Parts = ()
    """Training of the policy alone."""
    critics: _Parts = ()
    """Training of the others, beside decoding."""
    quiet: tuple[float, ...] = ()
    """Seconds of a decode step, mean of an iteration, while nothing was trained."""
    beside: tuple[float, ...] = ()
    """The same of iterations beside whose decoding critics were trained."""
    apart: float = 0.0
    """As in OverlapTimes, of the last iteration that waited for no critics."""
    latency: float = 0.0
    late_share: float = 1.0
    together_age: int = 0
    """Iterations since all models were last trained at once."""
    apart_age: int = 0
    """Iterations since critics were last trained apart."""

    def with_together(self, tokens: float, seconds: float) -> "MeasuredOverlap":
        """Return this with an iteration that trained all models at once."""
        return replace(self, together=_added(self.together, TrainedPart(tokens, seconds)), together_age=0)

    def with_parts(self, tokens: float, policy: float, critics: float) -> "MeasuredOverlap":
        """Return this with an iteration that trained its critics apart: seconds of each part."""
        parts = TrainedPart(tokens, policy), TrainedPart(tokens, critics)
        return replace(self, policy=_added(self.policy, parts[0]), critics=_added(self.critics, parts[1]), apart_age=0)

    def with_step(self, seconds: float, *, beside: bool) -> "MeasuredOverlap":
        """Return this with the mean decode step of an iteration; `beside`: critics were trained meanwhile."""
        if beside:
            return replace(self, beside=_added(self.beside, seconds))
        return replace(self, quiet=_added(self.quiet, seconds))

    def with_scoring(self, apart: float, latency: float, late_share: float) -> "MeasuredOverlap":
        """Return this with how an iteration was scored that waited for no critics; as in OverlapTimes."""
        return replace(self, apart=apart, latency=latency, late_share=late_share)

    def older(self) -> "MeasuredOverlap":
        """Return this one iteration later."""
        return replace(self, together_age=self.together_age + 1, apart_age=self.apart_age + 1)

    @property
    def contention(self) -> float:
        """Return how many times as long a decode step takes while critics are trained, 1 at least: by the quickest
        iterations of each kind, as other work on a machine only slows down; 1 until two of each were seen."""
        if min(len(self.quiet), len(self.beside)) < 2:
            return 1.0
        return max(1.0, min(self.beside) / min(self.quiet))

    def training(self, tokens: float) -> tuple[float, float, float]:
        """Return the seconds of training a batch of so many tokens: all at once, the policy alone, the others alone;
        each must have been measured."""
        windows = self.together, self.policy, self.critics
        rates = [[part.seconds / part.tokens for part in window] for window in windows]
        whole = [[part.seconds for part in window] for window in windows]
        if _scatter(rates) <= _scatter(whole):
            together, policy, critics = (tokens * statistics.median(window) for window in rates)
        else:
            together, policy, critics = (statistics.median(window) for window in whole)
        return together, policy, critics

    def document(self) -> dict[str, Any]:
        """Return all of it as plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "MeasuredOverlap":
        """Return what `document` wrote. Raises ValueError for what it cannot have written."""
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
    """How an iteration went, as far as a replay needs it; seconds."""

    tokens: int
    """Of prompts and responses that were trained on."""
    publishing: float
    finished: tuple[float, ...]
    """When each response was finished, counted from the first lease."""
    beside: bool
    """Critics were trained while it was decoded."""


@dataclass(frozen=True, slots=True)
class OverlapChoice:
    """What an iteration does with its critics, and why."""

    apart: bool
    kind: Literal["measure", "probe", "again", "faster", "kept"]
    """To measure all at once, or critics apart, for the first time; either again; what a replay says; as before, as
    nothing is known that could change it."""
    unchanged: float = 0.0
    """Seconds of an iteration that trains all at once, by the replay; 0: there is none."""
    overlapped: float = 0.0
    """The same with critics that are trained apart."""

    @property
    def reason(self) -> str:
        """Return the choice in words."""
        way = "trained beside the next decoding" if self.apart else "trained with the policy"
        if self.kind == "probe":
            return f"critics are {way} once, to measure it"
        if self.kind == "measure":
            return f"critics are {way}, to measure it"
        if self.kind == "again":
            return f"critics are {way} once, to measure it again"
        if self.kind == "kept":
            return f"critics are {way} as before: the last iteration was not seen whole"
        return (
            f"critics are {way}: the last iteration would take {self.overlapped:.3g} s with the overlap and "
            f"{self.unchanged:.3g} s without"
        )


def choose(measured: MeasuredOverlap, last: SeenIteration | None, *, apart: bool, pending: bool) -> OverlapChoice:
    """Return what the next iteration does. `last`: the newest that was seen whole; `apart`: what was last found to be
    faster; `pending`: critics of the iteration before are yet to be trained, so what that takes is not known."""
    if not measured.together:
        return OverlapChoice(False, "measure")
    if not measured.policy:
        return OverlapChoice(not pending, "measure" if pending else "probe")
    if (measured.together_age if apart else measured.apart_age) >= REMEASURE and not pending:
        return OverlapChoice(not apart, "again")
    if last is None or not last.finished or last.tokens <= 0:
        return OverlapChoice(apart, "kept")
    off, on = predicted(measured, last)
    wins = on < off if apart else on * (1 + MARGIN) < off
    return OverlapChoice(wins, "faster", off, on)


def predicted(measured: MeasuredOverlap, last: SeenIteration) -> tuple[float, float]:
    """Return the seconds of the last iteration without the overlap and with it, in a steady state; both ways must have
    been measured."""
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
    """How far measurements of the same differ, as the squares of their logarithms."""
    return sum(len(window) * statistics.pvariance(map(math.log, window)) for window in windows if len(window) > 1)


def _part(pair: Any) -> TrainedPart:
    tokens, seconds = map(_number, pair)
    if not tokens or not seconds:
        raise ValueError(f"measurements of the critics' overlap: {pair!r} is no training")
    return TrainedPart(tokens, seconds)


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"measurements of the critics' overlap: {value!r} is no time")
    return float(value)
