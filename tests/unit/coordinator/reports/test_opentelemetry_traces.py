"""Traces of a run follow its facts, also over restarts, and errors of tracing never stop a job."""

from pathlib import Path

import pytest
from tests.support.coordinator.sample_rows import sample_histories
from tests.support.observability.kept_spans import KeptSpans

from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_common.tracing.export import SpanExport
from rlhf_common.tracing.span import TraceSpan, iteration_trace, trace_words
from rlhf_coordinator.reports.sample_histories import SampleHistories
from rlhf_coordinator.reports.trackers.open_traces import open_traces
from rlhf_coordinator.reports.trackers.opentelemetry_traces import OpenTelemetryTraces, run_name

SECOND = 10**9
BEGAN = 100 * SECOND


def histories(**changes: object) -> SampleHistories:
    """Return the histories of three samples: one moved, one failed, one without observations."""
    columns = {
        "iteration": 2, "began_ns": BEGAN, "workers": ["generation-0", "generation-1"], "prompts": [5, 6, 7],
        "responses": [9, 1, 0], "places": [[(0.5, 0), (1.0, -1), (1.5, 1)], [(0.5, 1)], []],
        "finished": [2.0, None, None], "scored": [2.5, None, None], "versions": [[], [], []], "drafted": [4, 0, 0],
        "accepted": [3, 0, 0], "rewards": [0.25, None, None], "left_out": {1: "failed"},
    }  # fmt: skip
    return SampleHistories.model_validate({**columns, **changes})


def traced(share: float, *, began: bool = True) -> list[TraceSpan]:
    sender = KeptSpans()
    tracker = OpenTelemetryTraces("run", share, SpanExport(sender, "there"))
    tracker.span(pb.Span(worker="coordinator", name="Training", start_ns=BEGAN, end_ns=BEGAN + 5, iteration=2))
    tracker.span(pb.Span(worker="generation-0", name="decode", start_ns=BEGAN, end_ns=BEGAN + 5, iteration=2))
    if began:
        tracker.histories(histories())
    tracker.iteration(2, BEGAN + 3 * SECOND, {"reward": 0.5, "seconds/iteration": 2.0})
    tracker.finish({})
    return sender.spans


def test_an_iteration_has_its_phases_and_the_samples_that_are_told() -> None:
    spans = traced(1.0)
    assert {trace_words(span.trace) for span in spans} == {iteration_trace("run", 2)}
    (root,) = (span for span in spans if not span.parent)
    assert (root.name, root.start_ns, root.end_ns) == ("iteration", BEGAN, BEGAN + 3 * SECOND)
    assert root.attributes == {"rlhf.iteration": 2, "rlhf.reward": 0.5}
    assert sorted(span.name for span in spans if span.parent == root.span) == ["Training", "sample", "sample", "sample"]
    moved, failed, unseen = sorted(
        (span for span in spans if span.name == "sample"), key=lambda span: span.attributes["rlhf.sample"]
    )
    stays = [
        (
            span.name,
            (span.start_ns - BEGAN) / SECOND,
            (span.end_ns - BEGAN) / SECOND,
            span.attributes.get("rlhf.worker"),
        )
        for span in spans
        if span.parent == moved.span
    ]
    assert stays == [
        ("queued", 0.0, 0.5, None),
        ("decoding", 0.5, 1.0, "generation-0"),
        ("queued", 1.0, 1.5, None),
        ("decoding", 1.5, 2.0, "generation-1"),
        ("scoring", 2.0, 2.5, None),
    ]
    assert moved.end_ns == BEGAN + 2.5 * SECOND
    assert moved.attributes["rlhf.moves"] == 1
    assert (moved.attributes["rlhf.drafted_tokens"], moved.attributes["rlhf.accepted_tokens"]) == (4, 3)
    assert (moved.failure, failed.failure, failed.attributes["rlhf.left_out"]) == ("", "failed", "failed")
    assert "rlhf.reward" not in failed.attributes, "what nobody judged has no reward"
    assert [span.name for span in spans if span.parent == unseen.span] == []
    assert len({span.span for span in spans}) == len(spans)


def test_no_sample_is_told_of_a_share_of_none_and_what_began_unseen_began_by_its_seconds() -> None:
    assert sorted(span.name for span in traced(0.0)) == ["Training", "iteration"]
    (root,) = (span for span in traced(1.0, began=False) if span.name == "iteration")
    assert root.start_ns == BEGAN + 1 * SECOND


def test_any_histories_can_be_told() -> None:
    sender = KeptSpans()
    tracker = OpenTelemetryTraces("run", 1.0, SpanExport(sender, "there"))
    tracker.histories(sample_histories(0))
    tracker.finish({})
    assert tracker.counts()["dropped"] == 0
    assert all(span.start_ns <= span.end_ns for span in sender.spans)


@pytest.mark.parametrize("left", ["", "{", "[]", '{"run": 3}', '{"run": ""}'])
def test_a_run_keeps_its_name_and_gets_another_where_it_is_lost(left: str, tmp_path: Path) -> None:
    first = run_name(tmp_path)
    assert run_name(tmp_path) == first
    (tmp_path / "trackers" / "opentelemetry.json").write_text(left)
    second = run_name(tmp_path)
    assert second != first
    assert run_name(tmp_path) == second


def job(**trackers: object) -> RLHFJob:
    spec = {
        "algorithm": {"grpo": {}},
        "iterations": 1,
        "models": {"actor": {"path": "/models/policy"}, "reward": {"function": {"file": "reward.py"}}},
        "prompts": {"path": "/data/prompts.jsonl"},
        "trackers": trackers,
    }
    return RLHFJob.model_validate(
        {"apiVersion": "rlhf.dev/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "tiny"}, "spec": spec}
    )


def test_without_an_endpoint_there_is_nothing(tmp_path: Path) -> None:
    assert open_traces(job(), tmp_path, {}) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon", "ValueError"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "must be grpc"),
    ],
)
def test_what_cannot_be_opened_is_said_and_ends_nothing(
    variable: str,
    value: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    assert open_traces(job(), tmp_path) is None
    assert words in caplog.text


def test_a_run_folder_that_cannot_be_written_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "trackers").write_text("a file where the folder should be")
    opened = open_traces(job(openTelemetry={"endpoint": "http://127.0.0.1:1"}), tmp_path, {})
    assert opened is None
    assert "no traces are sent to http://127.0.0.1:1" in caplog.text


def test_the_manifest_says_where_and_how_many(tmp_path: Path) -> None:
    opened = open_traces(job(openTelemetry={"endpoint": "http://127.0.0.1:1", "sampleShare": 0.5}), tmp_path, {})
    assert opened is not None
    assert opened.run == run_name(tmp_path)
    opened.finish({})
