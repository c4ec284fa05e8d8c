"""Observations of decoding are the times of steps after their graphs are captured."""

from tests.support.workers.outbox import RecordedOutbox

from rlhf_workers.generation.engine import StepReport
from rlhf_workers.generation.engine_totals import EngineTotals
from rlhf_workers.generation.step_observations import Activity


def test_a_step_that_captured_is_shown_and_not_learned_from() -> None:
    activity, outbox = Activity(), RecordedOutbox()
    ordinary = StepReport(decoded=2, rows=2, keys=64, passes=1, graph_passes=1)
    capturing = StepReport(decoded=2, rows=2, keys=64, passes=1, capture_ns=40_000_000)
    for number, report in enumerate([ordinary, ordinary, capturing, ordinary]):
        activity.add(report, 3, number * 1000, number * 1000 + 900, outbox)
    activity.flush(outbox)
    assert [observation.decode.steps for observation in outbox.reports("decode")] == [2, 1]
    attributes = [span[-1] for span in outbox.reports("span")]
    assert [span["steps"] for span in attributes] == ["2", "1", "1"]
    assert [span.get("graph_share") for span in attributes] == ["1.00", "0.00", "1.00"]
    assert attributes[1]["capture_seconds"] == "0.040"


def test_nothing_is_said_of_graphs_where_there_are_none() -> None:
    activity, outbox = Activity(), RecordedOutbox()
    activity.add(StepReport(decoded=1, rows=1, keys=64, passes=1), 0, 0, 900, outbox)
    activity.flush(outbox)
    assert "graph_share" not in outbox.reports("span")[0][-1]


def test_steps_that_verified_drafts_are_told_apart_from_plain_ones() -> None:
    activity, outbox = Activity(), RecordedOutbox()
    plain = StepReport(decoded=2, rows=2, keys=64, passes=1)
    verifying = StepReport(decoded=6, rows=2, pass_rows=8, keys=768, passes=1, drafted=6, draft_ns=200)
    again = StepReport(decoded=0, rows=1, keys=32, passes=1, replayed=1)
    for number, report in enumerate([plain, verifying, verifying, again]):
        activity.add(report, 3, number * 1000, number * 1000 + 1000, outbox)
    activity.flush(outbox)
    (observation,) = outbox.reports("decode")
    decode = observation.decode
    assert (decode.steps, decode.tokens_per_row) == (4, (2 + 6 + 6) / 6), "what is replayed is not drawn"
    assert decode.draft_seconds == 4e-7
    verified = decode.verified
    assert (verified.steps, verified.rows_per_step, verified.keys_per_row) == (2, 2, 96)
    assert verified.seconds == 2 * 800e-9
    activity.add(plain, 3, 0, 1000, outbox)
    activity.flush(outbox)
    assert not outbox.reports("decode")[-1].decode.HasField("verified")


def test_known_tokens_that_are_decoded_again_together_count_each() -> None:
    activity, outbox = Activity(), RecordedOutbox()
    # Three samples, of which one decodes eight known tokens again, and one verifies two drafts.
    report = StepReport(rows=3, pass_rows=12, keys=1200, replayed=8, replayed_samples=1, drafted=2, passes=1)
    activity.add(report, 0, 0, 8000, outbox)
    activity.flush(outbox)
    (rebuild,) = [observation.rebuild for observation in outbox.reports("rebuild")]
    assert (rebuild.passes, rebuild.rows_per_pass, rebuild.tokens_per_row) == (8, 3, 100)
    assert rebuild.seconds == 8e-6


def test_totals_say_which_share_of_passes_was_replayed() -> None:
    totals = EngineTotals()
    totals.add(StepReport(rows=2, passes=1, capture_ns=40), 100)
    totals.add(StepReport(rows=2, passes=1, graph_passes=1), 100)
    assert (totals.passes, totals.graph_passes, totals.capture_ns) == (2, 1, 40)
