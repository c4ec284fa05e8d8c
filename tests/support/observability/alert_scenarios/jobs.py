"""Scenarios of the course of a job. One value every 30 seconds: 120 are an hour."""

from typing import Final

from tests.support.observability.promtool_files import (
    JOB,
    AlertScenario,
    Firing,
    fires,
    of_job,
    of_operator,
    phase,
    silent,
)

_PROGRESS: Final = "rlhf_last_progress_timestamp_seconds"


def _waits(reason: str, values: str) -> dict[str, str]:
    return of_operator("rlhf_job_waiting_since_timestamp_seconds", values, **JOB, reason=reason)


def _in(name: str, values: str = "1x400") -> dict[str, str]:
    """Return series in which the coordinator is in one phase; it serves 0 for the others."""
    return of_job("rlhf_phase", values, phase=name) | of_job("rlhf_phase", "0x400", phase="Complete")


def _iterations(values: str, last: str = "60x2000") -> dict[str, str]:
    return (
        of_job("rlhf_iteration", values)
        | of_job("rlhf_iteration_last_seconds", last)
        | of_operator("rlhf_job_created_timestamp_seconds", "0x2000", **JOB)
    )


def _failures(values: str) -> dict[str, str]:
    return of_operator("rlhf_job_restarts_total", values, **JOB, reason="failure")


def _failed(values: str) -> dict[str, str]:
    return of_operator("rlhf_job_condition", values, **JOB, condition="Failed", status="True")


SCENARIOS: Final[tuple[AlertScenario, ...]] = (
    fires(
        "RLHFJobNotStarting",
        "its pods come up and never load",
        _waits("Starting", "0x120"),
        "45m",
        "45m 0s",
        before="30m",
        reason="Starting",
    ),
    fires(
        "RLHFJobNotStarting",
        "an image is missing, and each release is short",
        _waits("Starting", "0x60 stale _x28 0x60") | _waits("Released", "_x61 0x28 stale"),
        "50m",
        "50m 0s",
        before="39m",
        reason="Starting",
    ),
    silent("RLHFJobNotStarting", "it loads for ten minutes", _waits("Starting", "0x20 stale"), "9m", "11m", "50m"),
    silent("RLHFJobNotStarting", "it waits for its queue", _waits("Queued", "0x120"), "50m"),
    fires(
        "RLHFJobUnschedulable",
        "no node has the GPUs",
        _waits("Unschedulable", "0x160"),
        "65m",
        "1h 5m 0s",
        before="50m",
        reason="Unschedulable",
    ),
    silent("RLHFJobUnschedulable", "nodes are added", _waits("Unschedulable", "0x40 stale"), "15m", "65m"),
    fires(
        "RLHFJobQueued",
        "it asks for more than the queue has",
        _waits("Queued", "0x3000"),
        "25h",
        "1d 1h 0m 0s",
        before="23h",
        reason="Queued",
    ),
    silent("RLHFJobQueued", "it is admitted after a night", _waits("Queued", "0x1500 stale"), "12h", "25h"),
    fires(
        "RLHFJobStuck",
        "generation hangs",
        _in("Generating") | of_job(_PROGRESS, "0x400") | phase("1x400"),
        "20m",
        "20m 0s",
        before="14m",
        phase="Generating",
    ),
    fires(
        "RLHFJobStuck",
        "a rank never comes back, and a new coordinator waits for it too",
        of_job("rlhf_phase", "1x20 stale", phase="Recovering")
        | of_job("rlhf_phase", "_x22 1x100", phase="Recovering", instance="10.0.0.2:7790")
        | of_job(_PROGRESS, "0x20 stale")
        | of_job(_PROGRESS, "_x22 660x100", instance="10.0.0.2:7790")
        | phase("1x400", "Recovering"),
        "45m",
        "34m 0s",
        before="40m",
        phase="Recovering",
    ),
    silent(
        "RLHFJobStuck",
        "a long optimizer batch",
        _in("Training") | of_job(_PROGRESS, "0x100 3000x60") | phase("1x400"),
        "20m",
        "50m",
        "1h",
    ),
    silent(
        "RLHFJobStuck",
        "it completes, and its coordinator is gone",
        of_job("rlhf_phase", "1x20 stale", phase="Checkpointing") | of_job(_PROGRESS, "0x20 stale"),
        "9m",
        "30m",
        "2h",
    ),
    silent(
        "RLHFJobStuck",
        "a pod has no node: that is another alert",
        _in("Starting") | of_job(_PROGRESS, "0x400") | phase("1x400", "Unschedulable"),
        "40m",
    ),
    silent(
        "RLHFJobStuck",
        "short phases that a scrape meets again and again",
        _in("Training") | of_job(_PROGRESS, "0+30x400") | phase("1x400"),
        "1h",
        "3h",
    ),
    fires(
        "RLHFJobNoProgress",
        "an iteration that took a minute takes for ever",
        _iterations("0+1x100 100x500") | phase("1x700"),
        "3h10m",
        "100",
        before="2h30m",
    ),
    silent(
        "RLHFJobNoProgress",
        "iterations of three hours are usual",
        _iterations("5x800", last="10800x800") | phase("1x800"),
        "3h",
        "6h",
    ),
    silent("RLHFJobNoProgress", "it was created an hour ago", _iterations("0x200") | phase("1x200"), "1h"),
    silent(
        "RLHFJobNoProgress",
        "it was suspended for three hours and has just resumed",
        _iterations("7x20 stale _x340 7x100")
        | phase("1x20 stale _x340 1x100")
        | phase("_x21 1x339 stale", "Suspended"),
        "2h30m",
        "3h5m",
        "3h20m",
    ),
    silent(
        "RLHFJobNoProgress",
        "it is complete",
        _iterations("0+1x60 60 stale") | phase("1x61 stale") | phase("_x62 1x900", "Complete"),
        "1h",
        "3h",
        "6h",
    ),
    fires(
        "RLHFJobRecoveringRepeatedly",
        "a rank runs out of memory again and again",
        _failures("0x20 1x20 2x20 3x100") | phase("1x400"),
        "35m",
        "3",
        before="25m",
    ),
    fires(
        "RLHFJobRecoveringRepeatedly",
        "ranks ask to be restarted, which counts as no failure",
        of_job("rlhf_recoveries_total", "0x10 1x10 2x10 3x10 4x100") | _failures("0x200") | phase("1x400"),
        "21m",
        "3",
        before="9m",
    ),
    silent("RLHFJobRecoveringRepeatedly", "one node is lost", _failures("0x20 1x200") | phase("1x400"), "15m", "1h"),
    silent(
        "RLHFJobRecoveringRepeatedly",
        "the operator restarts and serves an old count anew",
        _failures("7x40 stale")
        | of_operator("rlhf_job_restarts_total", "_x42 7x100", **JOB, reason="failure", instance="10.0.9.2:8080")
        | phase("1x400"),
        "22m",
        "1h",
    ),
    silent(
        "RLHFJobRecoveringRepeatedly",
        "it recovered, and is complete",
        _failures("0x20 1x5 2x5 3x200") | phase("1x36 stale") | phase("_x37 1x300", "Complete"),
        "20m",
        "1h",
    ),
    AlertScenario(
        "RLHFJobFailed",
        "it fails after an hour, and is not deleted",
        _failed("_x120 1x2000"),
        {"59m": (), "1h5m": (Firing(),), "4h": (Firing(),), "6h": (), "12h": ()},
    ),
    silent(
        "RLHFJobFailed",
        "the operator restarts, of a job that failed long ago",
        _failed("1x1200 stale")
        | of_operator(
            "rlhf_job_condition",
            "_x1206 1x600",
            **JOB,
            condition="Failed",
            status="True",
            instance="10.0.9.2:8080",
        ),
        "8h30m",
        "10h2m",
        "11h",
    ),
    silent(
        "RLHFJobFailed",
        "it completes",
        of_operator("rlhf_job_condition", "1x300", **JOB, condition="Failed", status="False"),
        "1h",
    ),
)
