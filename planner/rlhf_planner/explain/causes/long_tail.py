"""The long tail: most of the batch is finished, and generation waits for a few long responses.

The gain is that of inter-stage fusion where it is Disabled, simulated with the recorded lengths.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from rlhf_planner.explain.causes.slow_worker import SLOW
from rlhf_planner.explain.decode_costs import DecodeCosts, decode_costs
from rlhf_planner.explain.finding import MIN_SHARE, Finding, gained, spent
from rlhf_planner.explain.iteration_profile import IterationProfile, SampleFacts
from rlhf_planner.explain.replays import meets
from rlhf_planner.inter_stage.choose import choose
from rlhf_planner.inter_stage.costs import SCORE_BATCH, StageCosts
from rlhf_planner.inter_stage.fitted_costs import PassFormula, StepTime
from rlhf_planner.inter_stage.forecast import IterationSetup
from rlhf_planner.inter_stage.lengths import LengthModel
from rlhf_planner.inter_stage.simulate import simulate

TAIL: Final = 1 / 6
"""Share of the samples that form the tail."""
LINK_BYTES: Final = 4e8
"""Assumed bytes per second between workers; the coordinator starts from the same assumption."""
CONTEXTS: Final = (64, 1024)
"""Keys at which the formula of a step is sampled."""
FIELD: Final = "spec.fusion.interStage.mode"


class LongTail:
    """See the module."""

    name = "long tail"

    def find(self, facts: Sequence[IterationProfile]) -> Finding | None:
        """See `finding.LossCause`."""
        last = facts[-1]
        samples, settings = last.samples, last.settings
        if samples is None or len(samples.finished) < 2 or last.generation <= 0:
            return None
        finished = sorted(samples.finished)
        count = max(1, round(TAIL * len(finished)))
        waits = finished[-1] - finished[-1 - count] if len(finished) > count else 0.0
        if waits < MIN_SHARE * last.total or uneven(last):
            return None
        summary = (
            f"{waits / last.generation:.0%} of generation ({waits:.3g} s) waits for the last {count} of "
            f"{len(finished)} samples, the longest of {max(samples.responses):,.0f} tokens; "
            f"interStage is {settings.inter_stage}"
        )
        if settings.inter_stage != "Disabled" or settings.generation_workers < 2 or settings.overlap == "Disabled":
            why = "fusion is on already" if settings.inter_stage != "Disabled" else "no worker could score meanwhile"
            return spent(self.name, facts[-1:], waits, summary, why)
        ratio = _simulated(last, samples)
        if ratio is None:
            why = "the simulation of the recording does not match the measurement"
            return spent(self.name, facts[-1:], waits, summary, why)
        saved = last.fused * (1 - ratio)
        how = "simulated by the planner over these lengths"
        return gained(self.name, facts[-1:], saved, summary, how, field=FIELD, value="Auto")


def uneven(facts: IterationProfile) -> bool:
    """Return whether a worker is so slow that its delay looks like a tail."""
    costs = decode_costs(facts.steps)
    return costs is not None and max(costs.paces.values()) >= SLOW


def _simulated(facts: IterationProfile, samples: SampleFacts) -> float | None:
    """Return the share of generation and inference time that remains with fusion; None if unknown."""
    observed = decode_costs(facts.steps)
    if observed is None:
        return None
    settings = facts.settings
    costs = _stage_costs(facts, observed)
    lengths, prompts = [round(value) for value in samples.responses], [round(value) for value in samples.prompts]
    setup = IterationSetup(settings.generation_workers, settings.inference_workers, prompts)
    without = simulate(lengths, setup, costs)
    if not meets(without.seconds, facts.fused):
        return None
    model = LengthModel.prior(settings.max_response_tokens).with_batch(zip(prompts, lengths, strict=True))
    choice = choose(model, setup, costs)
    if not choice.fused:
        return 1.0
    fused = simulate(lengths, setup, costs, choice.threshold, choice.pool, choice.transfer, model=model)
    return fused.seconds / without.seconds


def _stage_costs(facts: IterationProfile, observed: DecodeCosts) -> StageCosts:
    """Return the planner's costs from the recorded facts, with an assumed link between workers."""
    rows = facts.settings.max_batch_size
    sizes = sorted({1, 2, max(1, rows // 4), max(1, rows // 2), rows})
    points = [StepTime(size, keys, observed.seconds(size, keys)) for size in sizes for keys in CONTEXTS]
    score = PassFormula(
        setup=sum(task.setup for task in facts.tasks), per_token=sum(task.per_token for task in facts.tasks)
    )
    costs = StageCosts.measured(
        decode=points,
        max_batch_size=rows,
        kv_bytes_per_token=1.0,
        bandwidth=LINK_BYTES,
        replays=facts.settings.tokens_replayed,
        padded=False,
    )
    # A job that decodes tokens again is deterministic, so its workers score samples one by one.
    return replace(costs, score=score, score_batch=1 if facts.settings.tokens_replayed else SCORE_BATCH)
