"""Rules of `spec.rollout`: prompts that are cut off, long rounds, sampling, and failed samples."""

from typing import Final

from rlhf_api.rules.common_rules import greedy_or_random
from rlhf_api.rules.rule import Rule


def of_cut_prompts() -> tuple[Rule, ...]:
    """Return the rules of surplus prompts, and of those that are cut off."""
    return _CUT_PROMPTS


def of_sampling() -> tuple[Rule, ...]:
    """Return the rules of sampling and of failed samples."""
    return _SAMPLING


_CUT_PROMPTS: Final = (
    Rule(
        field="spec.rollout.cutBy",
        node="spec",
        cel="!self.deterministic || self.rollout.oversample == 0 || self.rollout.cutBy == 'Counts'",
        holds=lambda values: (
            not values["spec.deterministic"]
            or values["spec.rollout.oversample"] == 0
            or values["spec.rollout.cutBy"] == "Counts"
        ),
        message="must be Counts in a deterministic job with spec.rollout.oversample: Clock depends on workers' speed",
    ),
    Rule(
        field="spec.rollout.cutBy",
        node="spec",
        cel=(
            "self.rollout.cutBy == 'Clock' || (self.rollout.oversample > 0 || self.rollout.longRounds == 'Auto')"
            " && self.rollout.maxStaleness == 0"
        ),
        holds=lambda values: (
            values["spec.rollout.cutBy"] == "Clock"
            or (
                (values["spec.rollout.oversample"] > 0 or values["spec.rollout.longRounds"] == "Auto")
                and values["spec.rollout.maxStaleness"] == 0
            )
        ),
        message=(
            "must be Clock unless spec.rollout.maxStaleness is 0, and spec.rollout.oversample above 0 or "
            "spec.rollout.longRounds Auto: Counts would cut off a carried long prompt again"
        ),
    ),
    Rule(
        field="spec.rollout.longRounds",
        node="spec",
        cel="self.rollout.longRounds != 'Enabled' || self.rollout.oversample > 0",
        holds=lambda values: values["spec.rollout.longRounds"] != "Enabled" or values["spec.rollout.oversample"] > 0,
        message="needs spec.rollout.oversample above 0 when it is Enabled; Auto chooses the number itself",
    ),
    Rule(
        field="spec.rollout.longRounds",
        node="spec",
        cel="self.rollout.longRounds == 'Disabled' || self.rollout.maxStaleness == 0",
        holds=lambda values: (
            values["spec.rollout.longRounds"] == "Disabled" or values["spec.rollout.maxStaleness"] == 0
        ),
        message="needs spec.rollout.maxStaleness 0, which is another way to train on prompts that were cut off",
    ),
    Rule(
        field="spec.rollout.oversample",
        node="spec",
        cel="self.rollout.longRounds != 'Auto' || self.rollout.oversample == 0",
        holds=lambda values: values["spec.rollout.longRounds"] != "Auto" or values["spec.rollout.oversample"] == 0,
        message="must be 0 with spec.rollout.longRounds: Auto, which chooses it: remove it, or use Enabled",
    ),
    Rule(
        field="spec.rollout.longRounds",
        node="spec",
        cel="self.rollout.longRounds != 'Auto' || !self.deterministic",
        holds=lambda values: values["spec.rollout.longRounds"] != "Auto" or not values["spec.deterministic"],
        message=(
            "must not be Auto in a deterministic job, because the choice follows from measured times: use Enabled with "
            "spec.rollout.oversample and spec.rollout.cutBy: Counts"
        ),
    ),
    Rule(
        field="spec.rollout.longRounds",
        node="spec",
        cel="self.rollout.longRounds != 'Auto' || self.fusion.interStage.mode == 'Auto'",
        holds=lambda values: (
            values["spec.rollout.longRounds"] != "Auto" or values["spec.fusion.interStage.mode"] == "Auto"
        ),
        message=(
            "needs spec.fusion.interStage.mode: Auto when it is Auto, because it chooses by the costs that fusion "
            "measures: set that, or use Enabled"
        ),
    ),
    Rule(
        field="spec.rollout.keepCut",
        node="spec",
        cel="self.rollout.keepCut == 'Nothing' || self.rollout.longRounds != 'Disabled'",
        holds=lambda values: (
            values["spec.rollout.keepCut"] == "Nothing" or values["spec.rollout.longRounds"] != "Disabled"
        ),
        message="needs spec.rollout.longRounds Enabled or Auto: only long rounds decode cut-off prompts again",
    ),
    Rule(
        field="spec.rollout.keepCut",
        node="spec",
        cel=(
            "self.rollout.keepCut == 'Nothing' || self.generation.speculation.mode != 'Disabled'"
            " && 'Siblings' in self.generation.speculation.drafters"
        ),
        holds=lambda values: (
            values["spec.rollout.keepCut"] == "Nothing"
            or (
                values["spec.generation.speculation.mode"] != "Disabled"
                and "Siblings" in values["spec.generation.speculation.drafters"]
            )
        ),
        message=(
            "needs spec.generation.speculation.mode Auto or Fixed, and Siblings in "
            "spec.generation.speculation.drafters, which drafts from these tokens"
        ),
    ),
    Rule(
        field="spec.rollout.maxStaleness",
        node="spec",
        cel="self.rollout.maxStaleness == 0 || self.rollout.oversample > 0",
        holds=lambda values: values["spec.rollout.maxStaleness"] == 0 or values["spec.rollout.oversample"] > 0,
        message="needs spec.rollout.oversample above 0: only samples that were cut off can be carried: set both, or 0",
    ),
)

_SAMPLING: Final = (
    greedy_or_random("spec.rollout.temperature", "spec"),
    Rule(
        field="spec.rollout.maxFailedSamples",
        node="spec",
        cel="self.rollout.maxFailedSamples < self.rollout.batchSize",
        holds=lambda values: values["spec.rollout.maxFailedSamples"] < values["spec.rollout.batchSize"],
        message="must be below spec.rollout.batchSize: an iteration trains on the remaining samples",
    ),
)
