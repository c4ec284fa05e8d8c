"""The queue of spans is bounded, counted, and never blocks; a collector's refusal is logged once."""

import logging
import threading
from collections.abc import Iterator, Sequence

import pytest
from tests.support.loopback import free_address
from tests.support.observability.otlp_collector import OtlpCollector

from rlhf_common.tracing.export import BATCH, SpanExport, open_export
from rlhf_common.tracing.span import TraceSpan

WAIT_SECONDS = 120.0


def span(number: int = 1, **fields: object) -> TraceSpan:
    return TraceSpan(**{"name": "work", "trace": 7, "span": number, "parent": 0, "start_ns": 1, "end_ns": 2, **fields})  # type: ignore[arg-type]


class ScriptedSender:
    """Accepts spans when allowed, with scripted answers."""

    def __init__(self) -> None:
        self.let, self.taken = threading.Event(), threading.Semaphore(0)
        self.let.set()
        self.batches: list[int] = []
        self.answers: list[bool | Exception] = []
        self.stopped = False

    def send(self, spans: Sequence[TraceSpan]) -> bool:
        self.taken.release()
        assert self.let.wait(WAIT_SECONDS), "it was to be let go"
        self.batches.append(len(spans))
        answer = self.answers.pop(0) if self.answers else True
        if isinstance(answer, Exception):
            raise answer
        return answer

    def stop(self) -> None:
        self.stopped = True
        self.let.set()


def test_all_that_is_queued_is_sent_before_the_end_in_bounded_calls() -> None:
    sender = ScriptedSender()
    export = SpanExport(sender, "there")
    export.add_made(3, lambda: (span(number) for number in range(1, 2 * BATCH + 2)))
    export.add(span())
    export.close(WAIT_SECONDS)
    assert sender.stopped
    assert sum(sender.batches) == 2 * BATCH + 2
    assert max(sender.batches) <= BATCH
    assert export.counts() == {"exported": 2 * BATCH + 2, "dropped": 0, "failed": 0}


def test_what_finds_no_room_is_dropped_and_counted_and_nobody_waits() -> None:
    sender = ScriptedSender()
    sender.let.clear()
    export = SpanExport(sender, "there", queued=4)
    export.add(span())
    assert sender.taken.acquire(timeout=WAIT_SECONDS), "the first is under way"
    for number in range(6):
        export.add(span(number + 2))
    export.add_made(10, lambda: [span(99)])
    assert export.counts() == {"exported": 0, "dropped": 12, "failed": 0}
    sender.let.set()
    export.close(WAIT_SECONDS)
    assert export.counts() == {"exported": 5, "dropped": 12, "failed": 0}
    export.add(span())
    assert export.counts()["dropped"] == 13, "after the end there is no room"


def test_what_is_not_taken_is_counted_and_said_once_until_it_is_taken_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    sender = ScriptedSender()
    sender.answers = [False, ValueError("odd"), True, False]
    export = SpanExport(sender, "there")
    for _ in range(4):
        before = sum(export.counts().values())
        export.add_made(2, lambda: [span()])
        assert sender.taken.acquire(timeout=WAIT_SECONDS)
        assert before <= sum(export.counts().values())
    export.close(WAIT_SECONDS)
    assert export.counts() == {"exported": 1, "dropped": 0, "failed": 3}
    assert [record.message for record in caplog.records] == [
        "spans are lost until there takes them: it cannot be reached, or refuses them",
        "there takes spans again",
        "spans are lost until there takes them: it cannot be reached, or refuses them",
    ]


def test_an_end_waits_for_a_bounded_time_and_gives_up_what_is_under_way(caplog: pytest.LogCaptureFixture) -> None:
    sender = ScriptedSender()
    sender.let.clear()
    export = SpanExport(sender, "there")
    export.add(span())
    assert sender.taken.acquire(timeout=WAIT_SECONDS)
    for number in range(3):
        export.add(span(number + 2))
    export.add_made(10, lambda: [span(99)])
    export.close(0.01)
    assert sender.stopped
    assert export.counts()["dropped"] == 13, "spans that no one will take are counted"
    assert "there did not take all spans in time" in caplog.text


def test_spans_that_cannot_be_made_cost_themselves_alone(caplog: pytest.LogCaptureFixture) -> None:
    sender = ScriptedSender()
    export = SpanExport(sender, "there")
    export.add_made(2, lambda: [span()] * (1 // 0))
    export.add(span())
    export.close(WAIT_SECONDS)
    assert export.counts() == {"exported": 1, "dropped": 2, "failed": 0}


def test_spans_that_were_made_before_a_failure_are_sent(caplog: pytest.LogCaptureFixture) -> None:
    """All of them were once counted as dropped, also those that had been exported."""

    def half_way(count: int) -> Iterator[TraceSpan]:
        yield from (span(number + 1) for number in range(count))
        raise ValueError("odd")

    sender = ScriptedSender()
    sender.let.clear()
    export = SpanExport(sender, "there")
    export.add(span())
    assert sender.taken.acquire(timeout=WAIT_SECONDS)
    export.add_made(BATCH + 10, lambda: half_way(BATCH + 3))
    export.add_made(2, lambda: half_way(5))  # its size was an estimate
    export.add_made(1, lambda: half_way(0))
    export.add(span())
    sender.let.set()
    export.close(WAIT_SECONDS)
    assert export.counts() == {"exported": 1 + BATCH + 3 + 5 + 1, "dropped": 7 + 1 + 1, "failed": 0}
    assert caplog.text.count("spans could not be made") == 3


def test_a_collector_gets_what_a_span_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20token")
    with OtlpCollector() as collector:
        export = open_export(collector.endpoint, "tests", {}, {"rlhf.job": "team/tiny"})
        export.add(span(1, attributes={"rlhf.sample": 3, "rlhf.reward": 0.5}))
        export.add(span(2, parent=1, failure="failed", end_ns=0))
        export.close(WAIT_SECONDS)
    first, second = sorted(collector.spans, key=lambda each: each.span)
    assert (first.name, first.trace, first.span, first.parent) == ("work", f"{7:032x}", f"{1:016x}", "")
    assert (first.start_ns, first.end_ns, first.failure) == (1, 2, "")
    assert first.attributes == {"rlhf.sample": 3, "rlhf.reward": 0.5}
    assert (first.resource["service.name"], first.resource["rlhf.job"]) == ("tests", "team/tiny")
    assert (second.parent, second.failure) == (f"{1:016x}", "failed")
    assert second.end_ns == second.start_ns, "no span ends before it begins"
    assert collector.headers[0]["authorization"] == "Bearer token"


def test_a_collector_that_refuses_and_one_that_is_not_there_fail_nothing() -> None:
    with OtlpCollector() as collector:
        collector.refuses = True
        export = open_export(collector.endpoint, "tests", {}, {})
        export.add(span())
        export.close(WAIT_SECONDS)
        assert export.counts() == {"exported": 0, "dropped": 0, "failed": 1}
    export = open_export(f"http://{free_address()}", "tests", {}, {})
    export.add(span())
    export.close(0.1)
    assert export.counts()["exported"] == 0
