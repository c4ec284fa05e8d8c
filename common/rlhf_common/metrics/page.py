"""Generates docs/metrics.md: `python -m rlhf_common.metrics.page` writes it.

Rule: the text of a table comes from the catalogue.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Final

from rlhf_common.metrics import (
    fusion,
    job,
    operator,
    process,
    run,
    samples,
    speculation,
    storage,
    training,
    worker,
    worker_drafts,
)
from rlhf_common.metrics.catalogue import METRICS, MODULES, declared_in, served_by
from rlhf_common.metrics.labels import JOBS, WORKERS
from rlhf_common.metrics.metric import Label, Metric, Server

PATH: Final = Path(__file__).parents[3] / "docs" / "metrics.md"
"""Path of the page in a checkout."""

_HEADINGS: Final[dict[ModuleType, tuple[str, str]]] = {
    operator: ("The operator, and jobs from its view", "Served by the operator, port 8080."),
    job: ("A job: iterations, phases, time, GPUs", "Served by the coordinator of the job, port 7790."),
    samples: ("A job: samples, workers, messages", "Served by the coordinator."),
    run: ("Results of an iteration", "Served by the coordinator, for the last finished iteration."),
    fusion: ("Inter-stage fusion", "Served by the coordinator."),
    speculation: ("Speculative decoding", "Served by the coordinator, summed over all workers."),
    training: ("Training", "Served by the coordinator."),
    storage: ("Weights, checkpoints, disks", "Served by the coordinator."),
    worker: ("A worker", "Served by each worker, port 7790."),
    worker_drafts: ("How a worker chooses its drafts", "Served by each worker, port 7790."),
    process: ("Every process", "Served by operator, coordinators and workers."),
}

_HEAD: Final = """# Metrics

This page lists every metric of the project. `make metrics-page` generates it from `common/rlhf_common/metrics/`; do not
edit it. See also [how to scrape metrics](how-to/scrape-metrics.md). [Dashboards](dashboards.md) and
[alerts](alerts.md) read these metrics.

Units are base units. A counter starts again from 0 with its process. If a value does not exist, its series is absent
and never 0. The series of a worker end with the worker, and the series of a job end with the job.

**Labels that the scrape adds.** The labels `rlhf_job`, `namespace` and `pod` of a job's process come from its pod, so
user code cannot set them. The operator serves series of all jobs, and sets `namespace` and `rlhf_job` itself.

**Exemplars.** Buckets of histograms have exemplars, which name the worker, iteration or sample of a value. Prometheus
must ask for OpenMetrics and run with `--enable-feature=exemplar-storage`. The file `timeline.json` of the run has the
same values.

**Metrics of an engine.** Names such as `vllm:*` are on the endpoint of the worker, under the engine's names.

**Disabled.** With `spec.metrics: Disabled` the processes of a job serve no metrics. The files of the run have the
metrics of every iteration nevertheless.
"""


def text() -> str:
    """Return the page as Markdown."""
    sections = (line for module in MODULES for line in _section(module))
    return "\n".join([_HEAD, *_sizes(), *sections, *_labels()])


def _sizes() -> Iterator[str]:
    yield f"## How many series\n\nAt most, with {JOBS:,} jobs at one operator and {WORKERS:,} workers in one job:\n"
    yield "| process | metrics | series |\n|---|---|---|"
    for server in Server:
        metrics = served_by(server)
        yield f"| {server} | {len(metrics)} | {sum(metric.series for metric in metrics):,} |"
    yield ""


def _section(module: ModuleType) -> Iterator[str]:
    heading, who = _HEADINGS[module]
    yield f"## {heading}\n\n{who}\n"
    yield "| metric | type, unit | labels | meaning | formula or source | normal |\n|---|---|---|---|---|---|"
    for metric in declared_in(module):
        yield _row(metric)
    yield ""


def _row(metric: Metric) -> str:
    notes = f" Absent: {metric.absent}." if metric.absent else ""
    labels = ", ".join(f"`{label.name}`" for label in metric.labels)
    source = metric.source + (f"; `{metric.run_metric}` in metrics.jsonl" if metric.run_metric else "")
    if metric.buckets:
        source += f"; buckets {metric.buckets[0]:g} to {metric.buckets[-1]:g}"
    cells = (
        f"`{metric.name}`",
        f"{metric.kind}, {metric.unit}",
        labels,
        metric.meaning + notes,
        source,
        metric.normal,
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _labels() -> Iterator[str]:
    """Yield the rows about labels; a name with several definitions has one row for each."""
    seen: dict[Label, list[str]] = {}
    for metric in METRICS:
        for label in metric.labels:
            seen.setdefault(label, []).append(f"`{metric.name}`")
    yield "## Labels\n"
    yield "| label | meaning | values | of |\n|---|---|---|---|"
    for label, metrics in sorted(seen.items(), key=lambda item: item[0].name):
        values = ", ".join(f"`{value}`" for value in label.values) if label.values else label.bound
        others = f" and {len(metrics) - 3} more" if len(metrics) > 4 else ""
        yield f"| `{label.name}` | {label.meaning} | {values} | {', '.join(metrics[: 3 if others else 4])}{others} |"
    yield ""


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PATH
    path.write_text(text(), encoding="utf-8")
