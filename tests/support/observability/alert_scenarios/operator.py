"""Scenarios of the operator. One value every 30 seconds: 120 are an hour."""

from typing import Final

from tests.support.observability.promtool_files import (
    JOB,
    AlertScenario,
    Firing,
    fires,
    of_job,
    of_operator,
    phase,
    series,
    silent,
)

_RELEASE: Final = {"namespace": "rlhf-system", "job": "rlhf"}
_SECOND: Final = "10.0.9.2:8080"


def _leads(values: str, instance: str = "10.0.9.1:8080") -> dict[str, str]:
    return of_operator("rlhf_operator_leader", values, instance=instance)


def _alive(values: str, resource: str = "pods") -> dict[str, str]:
    return of_operator("rlhf_operator_watch_alive_timestamp_seconds", values, resource=resource)


def _says(
    alert: str, story: str, series: dict[str, str], moment: str, figure: str = "", **labels: str
) -> AlertScenario:
    return AlertScenario(alert, story, series, {moment: (Firing(figure, _RELEASE | labels),)})


SCENARIOS: Final[tuple[AlertScenario, ...]] = (
    _says("RLHFOperatorNotLeading", "both wait for the Lease", _leads("0x60") | _leads("0x60", _SECOND), "6m"),
    silent("RLHFOperatorNotLeading", "one leads", _leads("1x60") | _leads("0x60", _SECOND), "10m", "25m"),
    silent(
        "RLHFOperatorNotLeading",
        "it takes over",
        _leads("1x20 stale") | _leads("0x24 1x60", _SECOND),
        "11m",
        "13m",
        "30m",
    ),
    _says("RLHFOperatorTwoLeaders", "without election", _leads("1x60") | _leads("1x60", _SECOND), "5m", "2"),
    silent(
        "RLHFOperatorTwoLeaders",
        "one is killed: its series stays for a scrape",
        _leads("1x20 1x2 stale") | _leads("0x20 1x60", _SECOND),
        "11m",
        "12m",
        "20m",
    ),
    silent(
        "RLHFOperatorTwoLeaders",
        "two releases, each with its own",
        _leads("1x60") | of_operator("rlhf_operator_leader", "1x60", namespace="blue", job="blue"),
        "20m",
    ),
    _says(
        "RLHFOperatorAbsent",
        "one of two releases goes",
        _leads("1x20 stale") | of_operator("rlhf_operator_leader", "1x90", namespace="blue", job="blue"),
        "25m",
    ),
    AlertScenario("RLHFOperatorAbsent", "there is none", series("up", "1x90", job="other"), {"15m": (Firing("", {}),)}),
    silent("RLHFOperatorAbsent", "it restarts", _leads("1x20 stale _x10 1x60"), "12m", "16m", "30m"),
    silent("RLHFOperatorAbsent", "its pod is another one", _leads("1x20 stale") | _leads("_x21 1x90", _SECOND), "30m"),
    _says(
        "RLHFOperatorQueueOld",
        "the API server is slow",
        of_operator("rlhf_operator_workqueue_oldest_age_seconds", "0x10 90x60"),
        "15m",
        "1m 30s",
    ),
    silent(
        "RLHFOperatorQueueOld",
        "a thousand jobs are created",
        of_operator("rlhf_operator_workqueue_oldest_age_seconds", "0x10 90x5 0x60"),
        "7m",
        "15m",
    ),
    _says(
        "RLHFOperatorWatchStale", "a proxy drops it", _leads("1x90") | _alive("0x90"), "10m", "10m 0s", resource="pods"
    ),
    silent("RLHFOperatorWatchStale", "a bookmark a minute", _leads("1x90") | _alive("0x1 60+30x90"), "10m", "40m"),
    silent(
        "RLHFOperatorWatchStale",
        "RLHFJobs have no bookmarks, and nothing changes",
        _leads("1x90") | _alive("0x90", "rlhfjobs"),
        "30m",
    ),
    silent("RLHFOperatorWatchStale", "a standby watches nothing", _leads("0x90") | _alive("0x90"), "30m"),
    _says(
        "RLHFOperatorErrors",
        "rights are missing",
        of_operator("rlhf_operator_reconcile_errors_total", "0+1x100", reason="RefusedError"),
        "30m",
        "30",
        reason="RefusedError",
    ),
    silent(
        "RLHFOperatorErrors",
        "the API server restarts",
        of_operator("rlhf_operator_reconcile_errors_total", "0x10 0+2x3 6x100", reason="UnavailableError"),
        "10m",
        "30m",
    ),
    fires(
        "RLHFCertificateExpiring",
        "it is not renewed",
        of_job("rlhf_certificate_expiry_timestamp_seconds", "90000x100"),
        "20m",
        "1d 0h 40m 0s",
        before="9m",
    ),
    silent(
        "RLHFCertificateExpiring",
        "it is renewed in time",
        of_job("rlhf_certificate_expiry_timestamp_seconds", "9000000x10 40000000x100"),
        "4m",
        "40m",
    ),
    fires("RLHFJobNotScraped", "there is no PodMonitor", phase("1x60"), "11m", before="9m"),
    fires(
        "RLHFJobNotScraped",
        "its coordinator is scraped alone",
        phase("1x60") | of_job("rlhf_iteration", "0x60") | of_job("rlhf_sessions", "2x60", group="training"),
        "11m",
    ),
    silent(
        "RLHFJobNotScraped",
        "all are",
        phase("1x60")
        | of_job("rlhf_iteration", "0x60")
        | of_job("rlhf_sessions", "2x60", group="training")
        | series("rlhf_worker_connected", "1x60", **JOB, worker="training-0", group="training"),
        "20m",
    ),
    fires(
        "RLHFJobNotScraped",
        "its coordinator stands still, and the operator calls that Recovering after a minute",
        phase("1x12 stale") | phase("_x13 1x60", "Recovering") | of_job("rlhf_iteration", "5x10 stale"),
        "16m",
        before="15m",
    ),
    silent(
        "RLHFJobNotScraped",
        "its coordinator is replaced within five minutes",
        phase("1x12 stale")
        | phase("_x13 1x7 stale", "Recovering")
        | phase("_x21 1x60")
        | of_job("rlhf_iteration", "5x10 stale _x10 5x60"),
        "11m",
        "16m",
        "30m",
    ),
    silent("RLHFJobNotScraped", "its pods are starting", phase("1x60", "Starting"), "20m"),
    silent("RLHFJobNotScraped", "it is complete", phase("1x10 stale") | phase("_x11 1x90", "Complete"), "20m", "40m"),
)
