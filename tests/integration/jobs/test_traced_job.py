"""Real local jobs with traces.

A collector receives their spans, their log lines name the traces, and without a collector the job does not differ.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.support.jobs.chaos import Ended, assert_same_weights, run_job
from tests.support.jobs.local_job import PROCESSES, write_job
from tests.support.loopback import free_address
from tests.support.observability.otlp_collector import CollectedSpan, OtlpCollector

pytestmark = pytest.mark.full


ITERATIONS, BATCH = 2, 8


def lines_of(run_dir: Path) -> dict[str, list[dict[str, Any]]]:
    """Return worker -> lines of its log, each of which is one JSON object."""
    logs = {name: run_dir / "logs" / f"{name}.log" for name in PROCESSES}
    return {name: [json.loads(line) for line in path.read_text().splitlines()] for name, path in logs.items()}


def traced_job(folder: Path, environ: dict[str, str], *settings: str) -> Ended:
    manifest = write_job(folder, algorithm="grpo", iterations=ITERATIONS, batch=BATCH, responses=8)
    with pytest.MonkeyPatch.context() as patched:
        for name, value in environ.items():
            patched.setenv(name, value)
        return run_job(manifest, folder / "run", settings=settings)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ended, list[CollectedSpan]]:
    """Return a job with traces of all samples and a JSON log, and its spans."""
    with OtlpCollector() as collector:
        ended = traced_job(
            tmp_path_factory.mktemp("traced"),
            {"RLHF_LOG_FORMAT": "json", "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=test"},
            f"trackers.openTelemetry.endpoint={collector.endpoint}",
            "trackers.openTelemetry.sampleShare=1",
        )
        return ended, list(collector.spans)


def test_every_line_of_every_process_says_whose_it_is(traced: tuple[Ended, list[CollectedSpan]]) -> None:
    ended, spans = traced
    traces = {span.attributes["rlhf.iteration"]: span.trace for span in spans if span.name == "iteration"}
    for name, lines in lines_of(ended.run_dir).items():
        assert lines[0]["message"] == f"start 1 of {name}"
        assert {line["worker"] for line in lines} == {name}
        assert {line["job"] for line in lines[-2:]} == {"default/tiny"}, "the job is known by the end"
        named = [line["iteration"] for line in lines if "iteration" in line]
        assert named == sorted(named)
        assert set(named) <= set(range(ITERATIONS))
        assert {line["trace_id"] == traces[line["iteration"]] for line in lines if "iteration" in line} <= {True}
    coordinator = lines_of(ended.run_dir)["coordinator"]
    assert {line["iteration"] for line in coordinator if "iteration" in line} == set(range(ITERATIONS))


def test_each_iteration_is_a_trace_of_its_phases_and_samples(traced: tuple[Ended, list[CollectedSpan]]) -> None:
    ended, spans = traced
    roots = sorted((span for span in spans if not span.parent), key=lambda span: span.start_ns)
    assert [(span.name, span.attributes["rlhf.iteration"]) for span in roots] == [("iteration", 0), ("iteration", 1)]
    assert len({span.trace for span in roots}) == ITERATIONS
    assert len({(span.trace, span.span) for span in spans}) == len(spans), "no span is there twice"
    for root, metrics in zip(roots, ended.lines, strict=True):
        within = [span for span in spans if span.trace == root.trace and span is not root]
        children = Counter(span.name for span in within if span.parent == root.span)
        assert children["sample"] == BATCH
        assert {"Generating", "Scoring", "Training"} <= set(children)
        assert root.attributes["rlhf.reward"] == pytest.approx(metrics["reward"])
        seconds = (root.end_ns - root.start_ns) / 1e9
        assert seconds == pytest.approx(metrics["seconds/iteration"], rel=0.5, abs=1.0), "two clocks, on a busy machine"
        assert all(root.start_ns <= span.start_ns <= span.end_ns <= root.end_ns for span in within if span.parent)
        assert root.resource["rlhf.job"] == "default/tiny"
        assert root.resource["service.name"] == "rlhf-coordinator"
        assert root.resource["deployment.environment"] == "test"


def test_a_sample_tells_where_it_was(traced: tuple[Ended, list[CollectedSpan]]) -> None:
    _, spans = traced
    samples = [span for span in spans if span.name == "sample"]
    assert {(span.attributes["rlhf.iteration"], span.attributes["rlhf.sample"]) for span in samples} == {
        (iteration, sample) for iteration in range(ITERATIONS) for sample in range(BATCH)
    }
    for sample in samples:
        stays = sorted((span for span in spans if span.parent == sample.span), key=lambda span: span.start_ns)
        assert stays[0].name == "queued"
        assert stays[-1].name == "scoring"
        decoding = [span for span in stays if span.name == "decoding"]
        assert decoding
        assert {span.attributes["rlhf.worker"] for span in decoding} <= {"generation-0", "generation-1"}
        assert 0 < sample.attributes["rlhf.response_tokens"] <= 8
        assert 0 <= sample.attributes["rlhf.reward"] <= 1


def test_a_dead_endpoint_and_none_give_the_same_job(traced: tuple[Ended, list[CollectedSpan]], tmp_path: Path) -> None:
    """Set the endpoint by the environment alone, as in many clusters; samples, metrics and weights are equal."""
    dead = traced_job(tmp_path / "dead", {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{free_address()}"})
    assert_same_weights(dead, traced[0])
    assert dead.reported("reward") == traced[0].reported("reward")
    assert dead.summary["phase"] == "Complete"
    log = dead.read("logs/coordinator.log")
    assert log.count("spans are lost until") + log.count("did not take all spans in time") >= 1
    assert log.count("spans are lost until") <= 1, "the log has one such line"
    assert "tracker-lost" not in dead.read("events.jsonl")
