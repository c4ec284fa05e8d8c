"""Pictures are drawn from a run folder with any contents."""

from pathlib import Path
from random import Random
from typing import Any

from matplotlib.figure import Figure

from rlhf_common import control_pb2 as pb
from rlhf_coordinator.reports.run_figures import KINDS, _draw_migrations, _last_iterations, _merge, draw_run
from rlhf_coordinator.reports.trackers.run_trackers import open_trackers
from rlhf_coordinator.reports.trackers.timeline_json import FILE, TimelineSpan, read_spans


def fill(folder: Path, iterations: int = 5) -> None:
    """Fill a run folder with synthetic spans of every kind of work."""
    random, trackers = Random(1), open_trackers(folder, 0)

    def span(worker: str, name: str, start: float, seconds: float, iteration: int) -> None:
        trackers.span(
            pb.Span(
                worker=worker,
                name=name,
                start_ns=int(start * 1e9),
                end_ns=int((start + seconds) * 1e9),
                iteration=iteration,
            )
        )

    for iteration in range(iterations):
        begin = 1000.0 + iteration * 4
        for worker in ("generation-0", "generation-1"):
            span(worker, "load-weights", begin, 0.1, iteration)
            span(worker, "prefill", begin + 0.1, 0.2, iteration)
            at = begin + 0.3
            while at < begin + 1.5 + random.random() * 0.7:
                span(worker, "decode", at, 0.03, iteration)
                at += 0.031
        for i in range(8):
            span("inference-0", "score/reference", begin + 0.8 + i * 0.2, 0.08, iteration)
            span("inference-0", "score/reward", begin + 0.9 + i * 0.2, 0.02, iteration)
        for rank in (0, 1):
            for i in range(6):
                span(f"training-{rank}", f"train/actor/{'FB'[i % 2]}", begin + 2.6 + 0.1 * (i + rank), 0.09, iteration)
                span(f"training-{rank}", "train/critic/F", begin + 3.3 + 0.05 * (i + rank), 0.04, iteration)
        span("coordinator", "checkpoint", begin + 3.8, 0.1, iteration)
        trackers.iteration(iteration, {"reward": iteration / iterations, "kl": 0.01 * iteration})
    trackers.finish({})


def test_both_pictures_are_drawn(tmp_path: Path) -> None:
    fill(tmp_path)
    assert [path.name for path in draw_run(tmp_path)] == ["timeline.png", "reward.png"]
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("timeline.png", "reward.png"))


def test_an_empty_run_has_no_pictures(tmp_path: Path) -> None:
    assert draw_run(tmp_path) == []


def test_a_migrated_sample_is_an_arrow_between_two_rows(tmp_path: Path) -> None:
    trackers = open_trackers(tmp_path, 0)
    for index, (name, destination) in enumerate((("decode", ""), ("migrate", "generation-1"))):
        attributes = {"destination": destination} if destination else {}
        for worker in ("generation-0", "generation-1")[: 2 - index]:
            start = int((1000.0 + index) * 1e9)
            trackers.span(
                pb.Span(worker=worker, name=name, start_ns=start, end_ns=start + 10**9, attributes=attributes)
            )
    trackers.finish({})
    spans = [span for span in read_spans(tmp_path / FILE) if span.destination]
    assert [(span.worker, span.destination) for span in spans] == [("generation-0", "generation-1")]
    axes = Figure().add_subplot()
    assert _draw_migrations(axes, spans, ["generation-0", "generation-1"], 1000.0) == 1
    notes: list[Any] = list(axes.texts)
    assert [(note.xyann, note.xy) for note in notes] == [((1.0, 0), (2.0, 1))]
    assert draw_run(tmp_path)


def test_only_the_last_iterations_are_shown() -> None:
    spans = [TimelineSpan("generation-0", "decode", 10.0 * i, 9.0, i) for i in range(8)]
    shown, first = _last_iterations(spans)
    assert (first, [span.iteration for span in shown]) == (5, [7, 6, 5])
    long = [TimelineSpan("generation-0", "decode", 100.0 * i, 90.0, i) for i in range(8)]
    assert _last_iterations(long)[1] == 7


def test_bars_closer_than_a_dot_become_one() -> None:
    assert _merge([(0, 1), (1.25, 1), (5, 1)], 0.3) == [(0, 2.25), (5, 1)]
    assert _merge([(0, 10), (1, 1)], 0.001) == [(0, 10)]


def test_kinds_have_distinct_colours() -> None:
    assert len({colour for _, colour, _ in KINDS}) == len(KINDS)
