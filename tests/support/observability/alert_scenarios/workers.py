"""Scenarios of the workers of a job. One value every 30 seconds: 120 are an hour."""

from typing import Final

from tests.support.observability.promtool_files import JOB, AlertScenario, fires, of_job, of_operator, phase, silent

_AT_WORK: Final = of_job("rlhf_iteration", "6+1x2000")


def _sessions(values: str) -> dict[str, str]:
    return (
        of_job("rlhf_sessions", values, group="generation")
        | of_job("rlhf_sessions", values, group="training")
        | of_job("rlhf_workers_wanted", "2x400", group="generation")
        | of_job("rlhf_workers_wanted", "4x400", group="training")
    )


def _gpus(idle: str, busy: str, requested: int = 4) -> dict[str, str]:
    return (
        of_operator("rlhf_job_gpus_requested", f"{requested}x2000", **JOB, group="generation")
        | of_operator("rlhf_job_gpus_requested", "0x2000", **JOB, group="coordinator")
        | of_job("rlhf_gpu_idle_seconds_total", idle, group="generation", cause="training")
        | of_job("rlhf_gpu_idle_seconds_total", idle, group="training", cause="no_work")
        | of_job("rlhf_gpu_busy_seconds_total", busy, group="generation")
        | of_job("rlhf_gpu_busy_seconds_total", busy, group="training")
    )


def _moves(failed: str, moved: str) -> dict[str, str]:
    return (
        of_job("rlhf_migration_failures_total", failed)
        | of_job("rlhf_migrated_samples_total", moved, by="kv")
        | of_job("rlhf_migrated_samples_total", "0+9x400", by="tokens")
        | _AT_WORK
    )


def _drafts(drafted: str, accepted: str, steps: str) -> dict[str, str]:
    return (
        of_job("rlhf_drafted_tokens_total", drafted, drafter="Ngram", position="0")
        | of_job("rlhf_accepted_tokens_total", accepted, drafter="Ngram", position="0")
        | of_job("rlhf_speculation_drafted_steps_total", steps)
        | of_job("rlhf_speculation_steps_total", "0+100x400")
        | _AT_WORK
    )


def _lost(values: str) -> dict[str, str]:
    return of_job("rlhf_worker_state", values, worker="generation-3", state="Lost")


SCENARIOS: Final[tuple[AlertScenario, ...]] = (
    fires(
        "RLHFWorkerLost",
        "its pod does not come back",
        of_job("rlhf_worker_state", "1x20 stale", worker="generation-3", state="Busy") | _lost("_x21 1x60"),
        "21m",
        before="19m",
        worker="generation-3",
    ),
    silent("RLHFWorkerLost", "it is back after two minutes", _lost("_x20 1x4 stale"), "11m", "15m", "21m"),
    silent(
        "RLHFWorkerLost",
        "it has not come yet",
        of_job("rlhf_worker_state", "1x60", worker="generation-3", state="Missing"),
        "20m",
    ),
    silent(
        "RLHFWorkerLost",
        "the job was restarted, and its workers register with the new coordinator",
        _lost("1x5 stale")
        | of_job("rlhf_worker_state", "_x6 1x60", worker="generation-3", state="Missing", instance="10.0.0.2:7790"),
        "5m",
        "15m",
        "30m",
    ),
    silent("RLHFWorkerLost", "its group was scaled down", _lost("_x20 1x1 stale") | phase("1x100"), "11m", "25m"),
    *(
        silent("RLHFWorkerLost", f"its job is {name}", _lost("_x20 1x60") | phase("1x100", name), "35m")
        for name in ("Stopping", "Checkpointing", "Queued", "Released")
    ),
    silent(
        "RLHFCoordinatorWithoutSessions",
        "it is suspended without a checkpoint",
        _sessions("2x40 0x60") | phase("1x200", "Stopping"),
        "26m",
        "40m",
    ),
    fires(
        "RLHFCoordinatorWithoutSessions",
        "its network is cut",
        _sessions("2x40 0x60") | phase("1x42 stale") | phase("_x43 1x60", "Recovering"),
        "26m",
        "6",
        before="24m",
    ),
    silent(
        "RLHFCoordinatorWithoutSessions",
        "it was restarted, and workers dial again",
        _sessions("2x40 stale _ 0x2 2x60") | phase("1x200"),
        "21m",
        "22m",
        "30m",
    ),
    silent(
        "RLHFCoordinatorWithoutSessions",
        "it has just begun: workers load their libraries",
        _sessions("0x30 2x60") | phase("1x30 stale", "Starting") | phase("_x31 1x60"),
        "10m",
        "14m",
    ),
    silent("RLHFCoordinatorWithoutSessions", "one group is lost", _sessions("2x10 1x90") | phase("1x200"), "30m"),
    silent(
        "RLHFCoordinatorWithoutSessions",
        "it is suspended",
        _sessions("2x10 0x3 stale") | phase("1x10 stale") | phase("_x11 1x200", "Suspended"),
        "6m",
        "20m",
    ),
    silent(
        "RLHFCoordinatorWithoutSessions",
        "it has failed, and its coordinator has five minutes to end",
        _sessions("2x10 0x30 stale") | phase("1x10 stale") | phase("_x11 1x200", "Failed"),
        "12m",
        "19m",
    ),
    fires(
        "RLHFGPUIdle",
        "a group waits for another for hours",
        _gpus("0+27x2000", "0+3x2000") | of_job("rlhf_started_timestamp_seconds", "0x2000"),
        "3h40m",
        "90%",
        before="3h10m",
    ),
    silent(
        "RLHFGPUIdle",
        "it began an hour ago and compiles",
        _gpus("0+27x2000", "0+3x2000") | of_job("rlhf_started_timestamp_seconds", "9000x2000"),
        "3h40m",
    ),
    silent(
        "RLHFGPUIdle",
        "it runs on CPUs, whose workers count as one GPU each",
        _gpus("0+27x2000", "0+3x2000", requested=0) | of_job("rlhf_started_timestamp_seconds", "0x2000"),
        "3h40m",
        "6h",
    ),
    silent(
        "RLHFGPUIdle",
        "half of the time",
        _gpus("0+15x2000", "0+15x2000") | of_job("rlhf_started_timestamp_seconds", "0x2000"),
        "4h",
    ),
    silent(
        "RLHFGPUIdle",
        "it ended",
        _gpus("0+27x400 stale", "0+3x400 stale") | of_job("rlhf_started_timestamp_seconds", "0x400 stale"),
        "3h50m",
        "5h",
    ),
    fires(
        "RLHFMigrationFailing",
        "peers do not reach one another",
        _moves("0+2x200", "0+0.5x200"),
        "30m",
        "80%",
        before="4m",
    ),
    silent("RLHFMigrationFailing", "some samples finish meanwhile", _moves("0+1x200", "0+10x200"), "30m", "1h"),
    silent("RLHFMigrationFailing", "three of four in an hour", _moves("0x20 0+1x3 3x100", "0x20 1x100"), "30m"),
    silent("RLHFMigrationFailing", "nothing is to move", _moves("0x200", "0x200"), "30m"),
    fires(
        "RLHFFusionMispredicted",
        "iterations take half as long again",
        of_job("rlhf_fusion_prediction_error_ratio", "0.5x400") | _AT_WORK,
        "40m",
        "50%",
        before="20m",
    ),
    fires(
        "RLHFFusionMispredicted",
        "and in the other direction",
        of_job("rlhf_fusion_prediction_error_ratio", "-0.4x400") | _AT_WORK,
        "40m",
        "40%",
    ),
    silent(
        "RLHFFusionMispredicted",
        "one is far off, and their mean is not",
        of_job("rlhf_fusion_prediction_error_ratio", "0.1x60 0.9x4 0.05x200") | _AT_WORK,
        "32m",
        "1h",
        "90m",
    ),
    silent(
        "RLHFFusionMispredicted",
        "the first iterations",
        of_job("rlhf_fusion_prediction_error_ratio", "0.9x200") | of_job("rlhf_iteration", "0+1x4 4x200"),
        "1h",
    ),
    fires(
        "RLHFSpeculationUseless",
        "it drafts always, and is right one time in twenty",
        _drafts("0+500x400", "0+25x400", "0+60x400"),
        "30m",
        "5%",
        before="9m",
    ),
    silent(
        "RLHFSpeculationUseless", "half of the drafts are right", _drafts("0+500x400", "0+250x400", "0+60x400"), "1h"
    ),
    silent("RLHFSpeculationUseless", "only probes draft", _drafts("0+500x400", "0+5x400", "0+1x400"), "1h"),
    silent("RLHFSpeculationUseless", "little was drafted", _drafts("0+5x400", "0x400", "0+60x400"), "1h"),
    silent("RLHFSpeculationUseless", "nothing is drafted", _drafts("0x400", "0x400", "0x400"), "1h"),
)
