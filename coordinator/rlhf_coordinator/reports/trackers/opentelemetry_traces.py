"""Traces of a run for OpenTelemetry: the phases of each iteration, and the histories of some of its samples.

Ids derive from a random name in the run folder.
"""

import contextlib
import json
import uuid
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from rlhf_common import control_pb2 as pb
from rlhf_common.json_document import parse_json
from rlhf_common.names import Group
from rlhf_common.tracing.export import SpanExport
from rlhf_common.tracing.span import Attribute, TraceSpan, is_sampled, span_id, trace_id
from rlhf_coordinator.reports.sample_histories import SampleHistories
from rlhf_coordinator.reports.trackers.service_tracker import FOLDER
from rlhf_coordinator.reports.trackers.tracker import Tracker

FILE: Final = "opentelemetry.json"
ITERATION_METRICS: Final = {
    "rlhf.reward": "reward",
    "rlhf.kl": "kl",
    "rlhf.loss": "training/actor/loss",
    "rlhf.samples_per_second": "samples_per_second",
    "rlhf.tokens_per_second": "tokens_per_second",
    "rlhf.response_tokens_mean": "response_tokens_mean",
}
"""Attribute of an iteration -> metric."""
SECONDS: Final = "seconds/iteration"


class OpenTelemetryTraces(Tracker):
    """Traces of one run."""

    def __init__(self, run: str, share: float, export: SpanExport) -> None:
        """`run`: random name of the run; `share`: fraction of the samples to trace, from 0 to 1."""
        self.run = run
        self._share, self._export = share, export
        self._began: dict[int, int] = {}

    def counts(self) -> dict[str, int]:
        """Return outcome -> number of spans."""
        return self._export.counts()

    def span(self, span: pb.Span) -> None:
        """Send a span of the coordinator, such as a phase; ignore those of workers."""
        if span.worker != Group.COORDINATOR.value:
            return
        trace, root = self._root(span.iteration)
        number = span_id(trace, span.name, span.start_ns)
        self._export.add(TraceSpan(span.name, trace, number, root, span.start_ns, span.end_ns))

    def histories(self, histories: SampleHistories) -> None:
        """Send the traced samples, and note when the iteration began."""
        self._began = {histories.iteration: histories.began_ns}
        trace, root = self._root(histories.iteration)
        traced = [index for index in range(len(histories.prompts)) if is_sampled(trace, self._share, index)]
        if traced:
            self._export.add_made(len(traced), partial(_sample_spans, histories, traced, trace, root))

    def iteration(self, iteration: int, time_ns: int, metrics: Mapping[str, float]) -> None:
        """Send the iteration, the root of its trace."""
        trace, root = self._root(iteration)
        began = self._began.get(iteration, time_ns - int(metrics.get(SECONDS, 0.0) * 1e9))
        shown: dict[str, Attribute] = {
            name: float(metrics[metric]) for name, metric in ITERATION_METRICS.items() if metric in metrics
        }
        attributes = {"rlhf.iteration": iteration, **shown}
        self._export.add(TraceSpan("iteration", trace, root, 0, min(began, time_ns), time_ns, attributes))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Send the remaining spans, for a bounded time."""
        self._export.close()

    def _root(self, iteration: int) -> tuple[int, int]:
        trace = trace_id(self.run, "iteration", iteration)
        return trace, span_id(trace, "iteration")


def run_name(run_dir: Path) -> str:
    """Return the random name of the run, which is stored in its folder. Raises OSError."""
    file = run_dir / FOLDER / FILE
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        stored = parse_json(file.read_bytes())["run"]
        if isinstance(stored, str) and stored:
            return stored
    file.parent.mkdir(parents=True, exist_ok=True)
    name, partial_file = uuid.uuid4().hex, file.with_suffix(".tmp")
    partial_file.write_text(json.dumps({"run": name}))
    partial_file.replace(file)
    return name


def _sample_spans(histories: SampleHistories, traced: list[int], trace: int, root: int) -> Iterator[TraceSpan]:
    """Yield the spans of samples, each followed by the spans of its stays on workers."""

    def at(moment: float) -> int:
        return histories.began_ns + int(moment * 1e9)

    for index in traced:
        number = span_id(trace, "sample", index)
        finished, scored, places = histories.finished[index], histories.scored[index], histories.places[index]
        moments = [moment for moment in (finished, scored) if moment is not None] + [since for since, _ in places]
        left_out = histories.left_out.get(index, "")
        yield TraceSpan(
            "sample", trace, number, root, at(0.0), at(max(moments, default=0.0)), _attributes(histories, index),
            failure=left_out if left_out == "failed" else "",
        )  # fmt: skip
        for name, start, end, worker in _stays(histories, index):
            where: dict[str, Attribute] = {"rlhf.worker": worker} if worker else {}
            yield TraceSpan(
                name, trace, span_id(trace, "sample", index, name, start), number, at(start), at(end), where
            )


def _stays(histories: SampleHistories, index: int) -> Iterator[tuple[str, float, float, str]]:
    """Yield (activity, from, to, worker) of a sample, in order: queued, decoding or scoring, as far as known."""
    places, finished, scored = histories.places[index], histories.finished[index], histories.scored[index]
    if places:
        yield "queued", 0.0, places[0][0], ""
        end = finished if finished is not None else places[-1][0]
        for (since, worker), (until, _) in pairwise([*places, (max(end, places[-1][0]), -1)]):
            yield ("queued", since, until, "") if worker < 0 else ("decoding", since, until, histories.workers[worker])
    if finished is not None and scored is not None:
        yield "scoring", finished, max(finished, scored), ""


def _attributes(histories: SampleHistories, index: int) -> dict[str, Attribute]:
    reward, left_out = histories.rewards[index], histories.left_out.get(index)
    shown: dict[str, Attribute] = {
        "rlhf.iteration": histories.iteration,
        "rlhf.sample": index,
        "rlhf.prompt_tokens": histories.prompts[index],
        "rlhf.response_tokens": histories.responses[index],
        "rlhf.moves": max(0, sum(worker >= 0 for _, worker in histories.places[index]) - 1),
    }
    if histories.drafted[index]:
        shown |= {"rlhf.drafted_tokens": histories.drafted[index], "rlhf.accepted_tokens": histories.accepted[index]}
    if reward is not None:
        shown["rlhf.reward"] = reward
    if left_out is not None:
        shown["rlhf.left_out"] = left_out
    return shown
