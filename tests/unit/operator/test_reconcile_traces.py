"""Traces of reconciles: their content; failed ones are always exported, and tracing is optional."""

import pytest
from tests.support.observability.kept_spans import KeptSpans
from tests.support.operator.controlled_cluster import KEY, ControlledCluster, object_names
from tests.support.operator.fake_api_server import FakeApiServer
from tests.support.operator.simulated_cluster import stored_job

from rlhf_common import names
from rlhf_common.tracing.export import SpanExport
from rlhf_operator import operator_logs
from rlhf_operator.__main__ import options
from rlhf_operator.reconcile_traces import ReconcileTraces, open_reconcile_traces

WAIT_SECONDS = 120.0


async def reconciled(traces: ReconcileTraces) -> dict[str, list[str]]:
    """Return the job after a reconcile by an operator with these traces."""
    async with FakeApiServer() as server:
        server.put(names.KIND, stored_job())
        async with ControlledCluster(server, traces) as operator:
            await operator.settle()
        return object_names(server)


async def test_a_reconcile_is_a_trace_of_its_steps_and_changes_nothing() -> None:
    sender = KeptSpans()
    export = SpanExport(sender, "there")
    assert await reconciled(ReconcileTraces(export)) == await reconciled(ReconcileTraces())
    export.close(WAIT_SECONDS)
    roots = [span for span in sender.spans if not span.parent]
    assert len(roots) > 1
    assert len({span.trace for span in roots}) == len(roots)
    for root in roots:
        steps = [span for span in sender.spans if span.parent == root.span]
        assert (root.name, root.attributes, root.failure) == (
            "reconcile",
            {"rlhf.job": KEY, "rlhf.result": "ok"},
            "",
        )
        assert [span.name for span in steps] == ["observe", "decide", "carry out"]
        assert {span.trace for span in steps} == {root.trace}
        assert all(root.start_ns <= span.start_ns <= span.end_ns <= root.end_ns for span in steps)


def test_a_share_of_reconciles_is_traced_and_every_one_that_fails() -> None:
    sender = KeptSpans()
    export = SpanExport(sender, "there")
    traces = ReconcileTraces(export, share=0.0)
    traces.begin(KEY).end("ok")
    failed = traces.begin(KEY)
    with pytest.raises(ValueError, match="odd"), failed.step("observe"):
        raise ValueError("odd")
    failed.end("error", "Bug: " + "x" * 1000)
    export.close(WAIT_SECONDS)
    root, step = sender.spans
    assert (root.name, root.failure[:6], len(root.failure)) == ("reconcile", "Bug: x", 500)
    assert (step.name, step.parent) == ("observe", root.span)
    assert f"{root.trace:032x}" == failed.id


def test_lines_of_a_reconcile_name_its_trace_where_there_is_one() -> None:
    with operator_logs.reconciling(KEY, None, ReconcileTraces().begin(KEY).id):
        assert "trace_id" not in operator_logs.present()
    with operator_logs.reconciling(KEY, None, "ab" * 16):
        assert operator_logs.present()["trace_id"] == "ab" * 16


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
    ],
)
def test_without_a_usable_endpoint_there_are_no_traces(environ: dict[str, str]) -> None:
    traces = open_reconcile_traces(1.0, environ)
    assert (traces.begin(KEY).id, traces.counts()) == ("", {})
    traces.close()


def test_an_endpoint_of_the_environment_is_used() -> None:
    traces = open_reconcile_traces(1.0, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"})
    assert len(traces.begin(KEY).id) == 32
    assert traces.counts() == {"exported": 0, "dropped": 0, "failed": 0}
    traces.close()


@pytest.mark.parametrize("share", ["-0.1", "1.5"])
def test_a_share_that_cannot_be_is_refused_by_name(share: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert options(["--trace-share", "0.25"]).trace_share == 0.25
    with pytest.raises(SystemExit):
        options([f"--trace-share={share}"])
    assert "--trace-share" in capsys.readouterr().err
