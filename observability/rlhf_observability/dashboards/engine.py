"""Engine: decoding speed, batch sizes, waiting times of samples, and memory.

Numbers of some engines only (vLLM: cache usage, waiting requests, prefix hits) are additional lines in the same panels.
vLLM's own metrics belong to its own dashboards.

Questions, in the order of the rows:
- Is generation as fast as before, and are its batches full?
- Which workers are slower than the others?
- Do samples wait, and how long is the tail?
- Is device memory sufficient?
"""

from typing import Final

from rlhf_common.metrics import samples, worker
from rlhf_observability.dashboards.panels import (
    BY_JOB,
    GREEN,
    ORANGE,
    RED,
    Dashboard,
    PanelUnit,
    Query,
    Row,
    Variable,
    heatmap,
    lines,
    stacked,
    stat,
)
from rlhf_observability.promql import JOB, JOBS, WORKERS, bottom, top, total

_FEW: Final = 8  # workers that a person can distinguish
_WORKER = f"{{{{worker}}}} {BY_JOB}"
_OF_WORKER = ("worker",)
_STEP = f"{WORKERS.rates(worker.ENGINE_DECODE_SECONDS, 'worker')} / {WORKERS.rates(worker.ENGINE_STEPS, 'worker')}"

FAST: Final = Row(
    "Is generation as fast as it was?",
    (
        stat(
            title="Decoded",
            unit=PanelUnit.TOKENS_PER_SECOND,
            shows="Tokens that the engines of the chosen workers sample a second.",
            normal="steady while the job generates, 0 while it trains unless stages overlap.",
            cure="Lower with full batches: longer steps; with emptier ones: no samples, or the tail.",
            queries=(Query(total(WORKERS.rate(worker.ENGINE_DECODED))),),
        ),
        stat(
            title="Batch of a step",
            unit=PanelUnit.SAMPLES,
            decimals=1,
            shows="Samples in a decode step, the mean of all steps.",
            normal=worker.ENGINE_ROWS.normal,
            cure="Small from the start: rollout.batchSize over workers is below generation.maxBatchSize.",
            queries=(Query(f"{total(WORKERS.rate(worker.ENGINE_ROWS))} / {total(WORKERS.rate(worker.ENGINE_STEPS))}"),),
        ),
        stat(
            title="Time of a step",
            unit=PanelUnit.SECONDS,
            shows="Time of a decode step, the mean of all steps.",
            normal="grows with the batch and with the context.",
            cure="Longer at the same batch: longer contexts, a colocated role on the device, or a hot one.",
            queries=(
                Query(
                    f"{total(WORKERS.rate(worker.ENGINE_DECODE_SECONDS))} / {total(WORKERS.rate(worker.ENGINE_STEPS))}"
                ),
            ),
        ),
        stat(
            title="Wait for the first token",
            unit=PanelUnit.SECONDS,
            shows="99th percentile of the time from a worker's receipt of a sample to its first token.",
            normal=samples.QUEUE_SECONDS.normal,
            cure="More samples are leased than fit: more workers, or a larger generation.maxBatchSize.",
            queries=(Query(JOBS.quantile(0.99, samples.QUEUE_SECONDS, window="30m")),),
        ),
        stacked(
            title="Tokens by group",
            unit=PanelUnit.TOKENS_PER_SECOND,
            shows="Tokens a second of the workers of each group: decoded, scored or trained.",
            normal="generation first, then inference and training; overlapping where stages are fused.",
            cure="A gap between groups is time in which nobody works: the job's row on GPUs names the cause.",
            queries=(Query(total(WORKERS.rate(worker.TOKENS), "group"), "{{group}}"),),
        ),
        lines(
            title="Decoded and prefilled",
            unit=PanelUnit.TOKENS_PER_SECOND,
            shows="Tokens sampled, tokens of prompts and resumed responses that ran through the model, and those found "
            "in the caches instead (vLLM) or kept there from one turn of a response to the next.",
            normal="prefill is a burst at the start of an iteration, and after moves by tokens.",
            cure="Prefill all the time: samples are taken back or moved again and again.",
            queries=(
                Query(WORKERS.rates(worker.ENGINE_DECODED), f"decoded {BY_JOB}"),
                Query(WORKERS.rates(worker.ENGINE_PREFILLED), f"prefilled {BY_JOB}"),
                Query(WORKERS.rates(worker.ENGINE_PREFIX_HITS), f"found {BY_JOB}"),
                Query(WORKERS.rates(worker.ENGINE_KEPT), f"kept {BY_JOB}"),
            ),
        ),
        lines(
            title="Where the engine's time goes",
            unit=PanelUnit.NUMBER,
            shows="Engines that decode and that prefill, as a mean over the time of a point.",
            normal=worker.ENGINE_PREFILL_SECONDS.normal,
            cure="Both far below the number of workers while the job generates: engines wait for samples.",
            queries=(
                Query(WORKERS.rates(worker.ENGINE_DECODE_SECONDS), f"decode {BY_JOB}"),
                Query(WORKERS.rates(worker.ENGINE_PREFILL_SECONDS), f"prefill {BY_JOB}"),
            ),
        ),
    ),
)
SLOW: Final = Row(
    "Which workers are slower than the others?",
    (
        lines(
            title="Slowest workers",
            unit=PanelUnit.TOKENS_PER_SECOND,
            shows="Tokens a second of the eight chosen workers with the fewest.",
            normal=samples.WORKER_TOKENS.normal,
            cure="One below all others with work to do: look at its node; end its pod, and another takes its samples.",
            queries=(Query(bottom(_FEW, JOBS.latest(samples.WORKER_TOKENS, "worker", worker="~$worker")), _WORKER),),
        ),
        lines(
            title="Longest steps",
            unit=PanelUnit.SECONDS,
            shows="Time of a decode step of the eight chosen workers with the longest.",
            normal="within a fifth of each other.",
            cure="One above all others: its batch beside; else its device is shared, hot or slow.",
            queries=(Query(top(_FEW, _STEP), _WORKER),),
        ),
        lines(
            title="Most samples",
            unit=PanelUnit.SAMPLES,
            shows="Samples held by the eight chosen workers with the most, those that wait in commands, and those "
            "that wait in the engine for a place in its batch or its caches (vLLM).",
            normal=worker.ACTIVE.normal,
            cure="One far above the others: spec.fusion.interStage.balance evens it out.",
            queries=(
                Query(top(_FEW, WORKERS.latest(worker.ACTIVE, *_OF_WORKER)), f"held {_WORKER}"),
                Query(top(_FEW, f"{WORKERS.latest(worker.QUEUED, *_OF_WORKER)} > 0"), f"queued {_WORKER}"),
                Query(top(_FEW, f"{WORKERS.latest(worker.ENGINE_WAITING, *_OF_WORKER)} > 0"), f"waiting {_WORKER}"),
            ),
        ),
    ),
)
WAIT: Final = Row(
    "Do samples wait, and how long is the tail?",
    (
        lines(
            title="From the first lease to the end",
            unit=PanelUnit.SECONDS,
            shows="Median and 99th percentile of a sample's time in generation; 99th of its wait for a token.",
            normal=samples.GENERATION_SECONDS.normal,
            cure="A 99th percentile of several medians is what fusion is for.",
            queries=(
                Query(JOBS.quantile(0.5, samples.GENERATION_SECONDS, *JOB, window="30m"), f"median {BY_JOB}"),
                Query(JOBS.quantile(0.99, samples.GENERATION_SECONDS, *JOB, window="30m"), f"99% {BY_JOB}"),
                Query(JOBS.quantile(0.99, samples.QUEUE_SECONDS, *JOB, window="30m"), f"99% wait {BY_JOB}"),
            ),
        ),
        heatmap(
            title="Responses by length",
            unit=PanelUnit.TOKENS,
            shows=samples.RESPONSE_TOKENS.meaning,
            normal=samples.RESPONSE_TOKENS.normal,
            cure="A band at the top is the limit: see the share cut off on the job's dashboard.",
            queries=(Query(JOBS.buckets(samples.RESPONSE_TOKENS)),),
        ),
        lines(
            title="Until scores come",
            unit=PanelUnit.SECONDS,
            shows="99th percentile of the time from a response's end to a score; of that to the first score.",
            normal=samples.SCORING_SECONDS.normal,
            cure="Long for one task: more inference workers, or a slow reward endpoint.",
            queries=(
                Query(
                    JOBS.quantile(0.99, samples.SCORING_SECONDS, *JOB, "task", window="30m"), f"{{{{task}}}} {BY_JOB}"
                ),
                Query(JOBS.quantile(0.99, samples.FIRST_SCORE_SECONDS, *JOB, window="30m"), f"first score {BY_JOB}"),
            ),
        ),
        lines(
            title="Samples taken back, and failed",
            unit=PanelUnit.SAMPLES,
            shows="Leases taken back as their worker was lost or reconnected; samples that workers failed on; samples "
            "that no worker could decode; samples that an engine computed again for want of cache (vLLM).",
            normal="0 but when workers are lost",
            cure="Without lost workers: sessions break; look at the network between workers and coordinator. Failed: "
            "the event SampleFailed names the sample. Computed again: fewer samples at once.",
            queries=(
                Query(JOBS.increases(samples.RETURNED), f"taken back {BY_JOB}"),
                Query(JOBS.increases(samples.DECODE_FAILURES), f"tries that failed {BY_JOB}"),
                Query(JOBS.increases(samples.FAILED), f"left out {BY_JOB}"),
                Query(WORKERS.increases(worker.ENGINE_PREEMPTIONS), f"computed again {BY_JOB}"),
            ),
        ),
    ),
)
MEMORY: Final = Row(
    "Does the memory of devices suffice?",
    (
        lines(
            title="Fullest devices and caches",
            empty="with the torch engine on CPUs",
            unit=PanelUnit.SHARE,
            high=1,
            thresholds=((None, GREEN), (0.9, ORANGE), (0.97, RED)),
            shows="Of the eight chosen workers with the most: the share of a GPU's memory in use, and of the engine's "
            "room for keys and values that samples hold (vLLM).",
            normal=worker.ENGINE_KV_USED.normal,
            cure="Near 1: a smaller generation.maxBatchSize, more workers, or a role that is offloaded.",
            queries=(
                Query(
                    top(
                        _FEW,
                        f"{WORKERS.latest(worker.DEVICE_USED, *_OF_WORKER)}"
                        f" / {WORKERS.latest(worker.DEVICE_SIZE, *_OF_WORKER)}",
                    ),
                    f"device {_WORKER}",
                ),
                Query(top(_FEW, WORKERS.latest(worker.ENGINE_KV_USED, *_OF_WORKER)), f"caches {_WORKER}"),
            ),
        ),
        lines(
            title="Held for scoring, given back by sleep",
            empty="where nothing is scored early and no engine sleeps",
            unit=PanelUnit.BYTES,
            shows="Keys and values that the eight workers with the most hold of samples scored before they end; "
            "bytes that engines gave to scoring and training when they slept.",
            normal=worker.ENGINE_FREED.normal,
            cure="Held never falls: samples stay unfinished. Nothing given back: the engine cannot sleep.",
            queries=(
                Query(top(_FEW, JOBS.latest(samples.PREFIX_CACHE, "worker", worker="~$worker")), f"held {_WORKER}"),
                Query(WORKERS.increases(worker.ENGINE_FREED), f"given back {BY_JOB}"),
            ),
        ),
    ),
)
ENGINE_DASHBOARD: Final = Dashboard(
    "rlhf-engine",
    "RLHF / Engine",
    "How fast tokens are decoded, how full batches are, how long samples wait, what memory holds.",
    (FAST, SLOW, WAIT, MEMORY),
    variables=(Variable.CLUSTER, Variable.NAMESPACE, Variable.JOB, Variable.WORKER),
    since="now-1h",
)
