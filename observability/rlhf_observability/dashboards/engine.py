"""Engine: decoding speed, batch sizes, waiting times of samples, and memory.

Numbers of some engines only (vLLM: cache usage, waiting requests, prefix hits) are additional lines in the same panels.

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
            title="Decoded tokens",
            unit=PanelUnit.TOKENS_PER_SECOND,
            shows="Tokens that the engines of the chosen workers sample per second.",
            normal="steady while the job generates; 0 while it trains, unless stages overlap.",
            cure="With full batches, steps take longer. With emptier batches, samples are missing, or the tail has "
            "begun.",
            queries=(Query(total(WORKERS.rate(worker.ENGINE_DECODED))),),
        ),
        stat(
            title="Batch size of a step",
            unit=PanelUnit.SAMPLES,
            decimals=1,
            shows="Samples per decode step, as a mean over all steps.",
            normal=worker.ENGINE_ROWS.normal,
            cure="If it is small from the start, rollout.batchSize divided by the number of workers is below "
            "generation.maxBatchSize.",
            queries=(Query(f"{total(WORKERS.rate(worker.ENGINE_ROWS))} / {total(WORKERS.rate(worker.ENGINE_STEPS))}"),),
        ),
        stat(
            title="Time of a step",
            unit=PanelUnit.SECONDS,
            shows="Time of a decode step, as a mean over all steps.",
            normal="grows with the batch and with the context.",
            cure="If steps take longer with the same batch, contexts are longer, a colocated role uses the device, or "
            "the device is hot.",
            queries=(
                Query(
                    f"{total(WORKERS.rate(worker.ENGINE_DECODE_SECONDS))} / {total(WORKERS.rate(worker.ENGINE_STEPS))}"
                ),
            ),
        ),
        stat(
            title="Wait for the first token",
            unit=PanelUnit.SECONDS,
            shows="99th percentile of the time from the arrival of a sample at a worker to its first token.",
            normal=samples.QUEUE_SECONDS.normal,
            cure="Workers lease more samples than fit into a batch: use more workers or a larger "
            "generation.maxBatchSize.",
            queries=(Query(JOBS.quantile(0.99, samples.QUEUE_SECONDS, window="30m")),),
        ),
        stacked(
            title="Tokens by group",
            unit=PanelUnit.TOKENS_PER_SECOND,
            shows="Tokens per second that the workers of each group decode, score or train.",
            normal="generation comes first, then inference and training; they overlap if stages are fused.",
            cure="In a gap between groups, no group works. The row on GPUs of the Job dashboard names the cause.",
            queries=(Query(total(WORKERS.rate(worker.TOKENS), "group"), "{{group}}"),),
        ),
        lines(
            title="Decoded and prefilled",
            unit=PanelUnit.TOKENS_PER_SECOND,
            shows="Tokens that the engine sampled, tokens of prompts and resumed responses that it prefilled, and "
            "tokens that it found in a cache instead: in the prefix cache (vLLM), or in the cache of the "
            "previous turn.",
            normal="prefill is a burst at the start of an iteration and after moves by tokens.",
            cure="If prefill never stops, the coordinator takes samples back or moves them repeatedly.",
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
            shows="Number of engines that decode and that prefill, as a mean over the interval of a point.",
            normal=worker.ENGINE_PREFILL_SECONDS.normal,
            cure="If both are far below the number of workers while the job generates, engines wait for samples.",
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
            shows="Tokens per second of the eight slowest of the chosen workers.",
            normal=samples.WORKER_TOKENS.normal,
            cure="If one worker with work is slower than all others, check its node. You can delete its pod; other "
            "workers then decode its samples.",
            queries=(Query(bottom(_FEW, JOBS.latest(samples.WORKER_TOKENS, "worker", worker="~$worker")), _WORKER),),
        ),
        lines(
            title="Longest steps",
            unit=PanelUnit.SECONDS,
            shows="Time of a decode step, for the eight chosen workers with the longest steps.",
            normal="the values differ by less than a fifth.",
            cure="If one worker is above all others, compare its batch. If the batch is not larger, its device is "
            "shared, hot or slow.",
            queries=(Query(top(_FEW, _STEP), _WORKER),),
        ),
        lines(
            title="Most samples",
            unit=PanelUnit.SAMPLES,
            shows="For the eight chosen workers with the most samples: all samples, samples in commands that have not "
            "started, and samples that wait in the engine for a place in its batch or its caches (vLLM).",
            normal=worker.ACTIVE.normal,
            cure="If one worker is far above the others, spec.fusion.interStage.balance evens out the load.",
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
            title="Time from the first lease to the end",
            unit=PanelUnit.SECONDS,
            shows="Median and 99th percentile of the generation time of samples, and 99th percentile of their wait for "
            "the first token.",
            normal=samples.GENERATION_SECONDS.normal,
            cure="If the 99th percentile is several times the median, use fusion.",
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
            cure="A band at the top is the limit of the length. The Job dashboard shows the share of truncated "
            "responses.",
            queries=(Query(JOBS.buckets(samples.RESPONSE_TOKENS)),),
        ),
        lines(
            title="Time until scores arrive",
            unit=PanelUnit.SECONDS,
            shows="99th percentile of the time from the end of a response to a score, and of the time to the first "
            "score.",
            normal=samples.SCORING_SECONDS.normal,
            cure="If one task takes long, use more inference workers, or check the reward endpoint.",
            queries=(
                Query(
                    JOBS.quantile(0.99, samples.SCORING_SECONDS, *JOB, "task", window="30m"), f"{{{{task}}}} {BY_JOB}"
                ),
                Query(JOBS.quantile(0.99, samples.FIRST_SCORE_SECONDS, *JOB, window="30m"), f"first score {BY_JOB}"),
            ),
        ),
        lines(
            title="Returned and failed samples",
            unit=PanelUnit.SAMPLES,
            shows="Leases that the coordinator took back because their worker was lost or reconnected; failed attempts "
            "to decode a sample; samples that no worker could decode; samples that an engine preempted and "
            "computed again (vLLM).",
            normal="0 while no worker is lost.",
            cure="If no worker is lost, sessions break: check the network between workers and coordinator. For failed "
            "samples, the event SampleFailed names the sample. For preempted samples, lower "
            "generation.maxBatchSize.",
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
    "Do devices have enough memory?",
    (
        lines(
            title="Fullest devices and caches",
            empty="for the torch engine on CPUs",
            unit=PanelUnit.SHARE,
            high=1,
            thresholds=((None, GREEN), (0.9, ORANGE), (0.97, RED)),
            shows="For the eight chosen workers with the highest values: the share of GPU memory in use, and the share "
            "of the engine's KV cache space in use (vLLM).",
            normal=worker.ENGINE_KV_USED.normal,
            cure="Near 1, use a smaller generation.maxBatchSize, more workers, or offload a role.",
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
            title="Scoring caches, and memory freed by sleep",
            empty="if workers score no unfinished samples and no engine sleeps",
            unit=PanelUnit.BYTES,
            shows="For the eight workers with the most: size of the keys and values of samples that they score before "
            "the end, and bytes that engines released when they slept.",
            normal=worker.ENGINE_FREED.normal,
            cure="If the scoring caches do not shrink, samples stay unfinished. If no memory is freed, the engine "
            "cannot sleep.",
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
    "How fast engines decode tokens, how full batches are, how long samples wait, and how much memory is in use.",
    (FAST, SLOW, WAIT, MEMORY),
    variables=(Variable.CLUSTER, Variable.NAMESPACE, Variable.JOB, Variable.WORKER),
    since="now-1h",
)
