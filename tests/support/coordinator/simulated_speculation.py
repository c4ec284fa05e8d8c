"""A simulated engine for the controller of speculation: passes with given costs, drafts with given acceptance.

Rule: a controller receives only what an engine would measure; randomness comes from the seed alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rlhf_planner.speculation.controller import DraftController, MeasuredStep, Offered, Outcomes, Plan

Ints = npt.NDArray[np.int64]
MATCHES = 16


@dataclass(frozen=True)
class World:
    """The true properties of an engine: seconds of a pass by rows, and acceptance of drafts."""

    pass_seconds: Callable[[int], float]
    acceptance: tuple[float, ...]
    """Acceptance at every position, by drafter."""
    draft_seconds: tuple[float, ...]
    """Seconds of one draft, by drafter."""
    available: float = 1.0
    """Share of the requests for which there is a draft."""
    hiccups: float = 0.0
    """Share of the steps that take four times as long."""
    noise: float = 0.0
    """Standard deviation of the logarithm of a step's seconds."""
    choosing: float = 0.0
    """Seconds that a step with drafters takes besides their own."""
    cold: float = 0.0
    """Additional seconds of the first such step after a plain one."""


@dataclass
class Ran:
    """The result of a run."""

    tokens: int = 0
    seconds: float = 0.0
    expected_seconds: float = 0.0
    """Seconds without noise."""
    expected_tokens: float = 0.0
    slots: list[int] = field(default_factory=list)
    asked: int = 0

    @property
    def rate(self) -> float:
        """Return the expected tokens per second, without the randomness of acceptance."""
        return self.expected_tokens / self.expected_seconds


def accepted_of(world: World, drafter: int, lengths: Ints, random: np.random.Generator) -> Ints:
    """Return the number of accepted tokens of each draft."""
    right = random.random((len(lengths), max(int(lengths.max(initial=0)), 1))) < world.acceptance[drafter]
    right &= np.arange(right.shape[1]) < lengths[:, None]
    accepted: Ints = np.cumprod(right, axis=1).sum(axis=1)
    return accepted


def run(
    controller: DraftController,
    world: World,
    rows: int,
    steps: int,
    *,
    seed: int = 0,
    fixed: int | None = None,
    plan_every: int = 4,
) -> tuple[DraftController, Ran]:
    """Make steps of `rows` samples. `fixed`: tokens that the first drafter drafts for each, without learning."""
    random = np.random.default_rng(seed)
    ran = Ran()
    plan: Plan | None = None
    warm = False
    for index in range(steps):
        if fixed is not None:
            plan = Plan((0,) if fixed else (), rows, rows * fixed, "Faster", 0.0)
        elif plan is None or plan.probes or index % plan_every == 0:
            plan = controller.plan(rows, rows * 64)
        lengths, drafters, matches = np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)
        drafting = 0.0
        if plan.drafters:
            count = min(plan.requests, rows)
            offers = tuple(
                Offered(
                    drafter,
                    np.full(count, 3, np.int64),
                    np.where(random.random(count) < world.available, controller.longest, 0),
                )
                for drafter in plan.drafters
            )
            took = tuple(world.draft_seconds[drafter] * count for drafter in plan.drafters)
            drafting = sum(took) + world.choosing + (0.0 if warm else world.cold)
            if fixed is not None:
                lengths = np.minimum(offers[0].lengths, fixed)
                drafters = np.zeros(count, np.int64)
            else:
                choice = controller.choose(plan, rows, rows * 64, offers)
                controller = controller.offered(offers, choice, took)
                lengths = choice.lengths
                drafters = np.array(plan.drafters)[choice.drafters]
            matches = np.full(count, 3, np.int64)
        warm = bool(plan.drafters)
        accepted = np.zeros(len(lengths), np.int64)
        for drafter in range(len(world.acceptance)):
            mine = drafters == drafter
            accepted[mine] = accepted_of(world, drafter, lengths[mine], random)
        slots = int(lengths.sum())
        true_pass = world.pass_seconds(rows + slots)
        seconds = true_pass * float(np.exp(random.normal(0.0, world.noise)))
        seconds *= 4.0 if random.random() < world.hiccups else 1.0
        used = lengths > 0
        if fixed is None:
            step = MeasuredStep(rows, rows * 64, slots, rows + int(accepted.sum()), drafting, seconds)
            outcomes = Outcomes(drafters[used], matches[used], lengths[used], accepted[used])
            controller = controller.observe(plan, step, outcomes)
        ran.tokens += rows + int(accepted.sum())
        ran.seconds += seconds + drafting
        ran.expected_seconds += true_pass + drafting
        rates = np.array(world.acceptance)[drafters]
        ran.expected_tokens += rows + float(sum((rates**place)[lengths >= place].sum() for place in range(1, 17)))
        ran.slots.append(slots)
        ran.asked += bool(plan.drafters)
    return controller, ran
