"""Scenarios of a job's learning. One value every 30 seconds: 120 are an hour."""

from typing import Final

from tests.support.observability.promtool_files import AlertScenario, fires, of_job, silent

_AT_WORK: Final = of_job("rlhf_iteration", "0+1x2000")


def _reward(mean: str, deviation: str = "0.3x2000") -> dict[str, str]:
    return of_job("rlhf_reward_mean", mean) | of_job("rlhf_reward_std", deviation) | _AT_WORK


SCENARIOS: Final[tuple[AlertScenario, ...]] = (
    fires(
        "RLHFRewardMissing",
        "every sample abstains from the fortieth iteration on",
        of_job("rlhf_iteration_last_seconds", "90x200") | of_job("rlhf_reward_mean", "0.4x40 stale"),
        "35m",
        "1m 30s",
        before="28m",
    ),
    silent("RLHFRewardMissing", "no iteration has finished", _AT_WORK, "1h"),
    silent(
        "RLHFRewardMissing",
        "it is complete",
        of_job("rlhf_iteration_last_seconds", "90x40 stale") | of_job("rlhf_reward_mean", "0.4x40 stale"),
        "10m",
        "35m",
    ),
    fires(
        "RLHFRewardFailing",
        "the reward gives NaN for some responses",
        of_job("rlhf_score_failures_total", "0x20 0+2x60", task="reward") | _AT_WORK,
        "30m",
        "60",
        before="10m",
        task="reward",
    ),
    silent(
        "RLHFRewardFailing",
        "an endpoint has a short outage",
        of_job("rlhf_score_failures_total", "0x20 0+2x3 6x100", task="reward") | _AT_WORK,
        "15m",
        "30m",
    ),
    silent(
        "RLHFRewardFailing",
        "it has ended",
        of_job("rlhf_score_failures_total", "0+2x40 stale", task="reward") | of_job("rlhf_iteration", "0x40 stale"),
        "26m",
        "30m",
    ),
    fires(
        "RLHFSamplesFailing",
        "a prompt breaks the engine of every worker",
        of_job("rlhf_decode_failures_total", "0x20 0+1x4 4x100") | _AT_WORK,
        "20m",
        "4",
        before="10m",
    ),
    silent(
        "RLHFSamplesFailing",
        "one worker failed on one sample, and another could",
        of_job("rlhf_decode_failures_total", "0x20 1x100") | _AT_WORK,
        "15m",
        "45m",
    ),
    fires(
        "RLHFRewardCollapsed",
        "it had learned, and the policy falls apart",
        _reward("0.1+0.005x120 0.7x60 0.1x200"),
        "2h",
        "0.6",
        before="1h30m",
    ),
    silent("RLHFRewardCollapsed", "it learns", _reward("0.1+0.005x150"), "1h", "75m"),
    silent(
        "RLHFRewardCollapsed",
        "it wavers, less than its samples do",
        _reward("0.6x30 0.45x30 0.6x30 0.45x30 0.6x30 0.45x200"),
        "40m",
        "1h",
        "2h",
    ),
    silent("RLHFRewardCollapsed", "one iteration was bad", _reward("0.7x100 0.0x4 0.7x200"), "51m", "55m", "1h10m"),
    silent(
        "RLHFRewardCollapsed",
        "a restarted coordinator knows no reward yet",
        _reward("0.7x100 stale _x20 0.68x200"),
        "55m",
        "1h5m",
    ),
    fires(
        "RLHFKLRunaway",
        "it leaves its reference",
        of_job("rlhf_kl_per_token", "0.02x20 0.1+0.05x100"),
        "30m",
        "2.05",
        before="15m",
    ),
    silent(
        "RLHFKLRunaway", "one iteration was far off", of_job("rlhf_kl_per_token", "0.02x20 2x4 0.02x60"), "12m", "25m"
    ),
    silent("RLHFKLRunaway", "the algorithm has no reference", _AT_WORK, "1h"),
    fires(
        "RLHFKLRunaway",
        "the divergence becomes NaN",
        of_job("rlhf_kl_per_token", "0.02x20 stale")
        | of_job("rlhf_iteration_metric", "_x21 1x60", name="nonfinite/kl_per_token")
        | of_job("rlhf_iteration_metric", "_x21 1x60", name="nonfinite/kl"),
        "25m",
        "NaN",
        before="15m",
    ),
    silent(
        "RLHFKLRunaway",
        "another metric is infinite",
        of_job("rlhf_kl_per_token", "0.02x80") | of_job("rlhf_iteration_metric", "1x80", name="nonfinite/klein"),
        "30m",
    ),
    fires(
        "RLHFMismatchHigh",
        "the engine computes in eight bits",
        of_job("rlhf_policy_mismatch", "0.09x60", model="actor"),
        "20m",
        "0.09",
        before="9m",
        model="actor",
    ),
    fires(
        "RLHFMismatchHigh",
        "the trainer's log-probabilities are NaN",
        of_job("rlhf_iteration_metric", "1x60", name="nonfinite/training/actor/mismatch"),
        "20m",
        "NaN",
        before="9m",
        model="actor",
    ),
    silent(
        "RLHFMismatchHigh",
        "the weights of a correction are infinite",
        of_job("rlhf_iteration_metric", "1x60", name="nonfinite/training/actor/mismatch_weight"),
        "20m",
    ),
    silent("RLHFMismatchHigh", "bfloat16", of_job("rlhf_policy_mismatch", "0.008x60", model="actor"), "20m"),
    fires(
        "RLHFNonfiniteSteps",
        "gradients overflow",
        of_job("rlhf_nonfinite_steps_total", "0x20 1x5 2x5 3x5 5x50") | _AT_WORK,
        "20m",
        "5",
        before="14m",
    ),
    silent(
        "RLHFNonfiniteSteps",
        "two in a day",
        of_job("rlhf_nonfinite_steps_total", "0x20 1x300 2x300") | _AT_WORK,
        "15m",
        "2h40m",
    ),
    silent(
        "RLHFNonfiniteSteps",
        "a coordinator in a new pod serves the count of all of the job",
        of_job("rlhf_nonfinite_steps_total", "9x40 stale")
        | of_job("rlhf_nonfinite_steps_total", "_x44 9x100", instance="10.0.0.2:7790")
        | _AT_WORK,
        "30m",
        "1h",
    ),
)
