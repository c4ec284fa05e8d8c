"""Queries that no server could answer are rejected at import; so are those in tests."""

from collections.abc import Callable

import pytest
from tests.support.observability.promql_reading import Dimension, Reader

from rlhf_common.metrics import job, operator, run, samples, training
from rlhf_common.metrics.catalogue import BY_NAME
from rlhf_observability.promql import FLEET, JOB, JOBS, bottom, or_zero, top, total

CHOSEN = 'cluster=~"$cluster",namespace=~"$namespace",rlhf_job=~"$job"'
READER = Reader(BY_NAME)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: JOBS.value(samples.TOKENS), "rlhf_tokens_total is a counter: show its rate"),
        (lambda: JOBS.value(training.STEP_SECONDS), "rlhf_training_step_seconds is a histogram"),
        (lambda: JOBS.rate(run.REWARD), "rlhf_reward_mean is a gauge, no counter"),
        (lambda: JOBS.quantile(0.5, run.REWARD), "rlhf_reward_mean is a gauge, no histogram"),
        (lambda: JOBS.value(run.REWARD, worker="generation-0"), "rlhf_reward_mean has no label worker"),
        (lambda: JOBS.rate(job.GPU_IDLE, cause="boredom"), "cause is never boredom: tail"),
        (lambda: FLEET.value(operator.PHASE, phase="~Running|Runing"), "phase is never Runing"),
        (lambda: FLEET.value(operator.PHASE, phase="!Runing"), "phase is never Runing"),
    ],
)
def test_what_no_process_serves_is_refused_by_name(build: Callable[[], str], words: str) -> None:
    with pytest.raises(ValueError) as refused:
        build()
    assert words in str(refused.value)


def test_queries_are_what_a_person_would_write() -> None:
    assert JOBS.latest(run.REWARD) == f"max by ({', '.join(JOB)}) (rlhf_reward_mean{{{CHOSEN}}})"
    assert JOBS.rate(job.GPU_IDLE, cause="~tail|turn") == (
        f'rate(rlhf_gpu_idle_seconds_total{{{CHOSEN},cause=~"tail|turn"}}[$__rate_interval])'
    )
    assert top(3, total("x", "le")) == "topk(3, sum by (le) (x))"
    assert bottom(3, "x") == "bottomk(3, x)"
    assert or_zero("x", "code") == 'x or on () label_replace(vector(0), "code", "none", "", "")'


@pytest.mark.parametrize(
    ("expression", "dimension", "labels"),
    [
        ("rate(rlhf_tokens_total[$__rate_interval])", (("s", -1), ("tokens", 1)), {"rlhf_job", "pod"}),
        ("sum by (rlhf_job) (rate(rlhf_gpu_busy_seconds_total[1m])) / sum by (rlhf_job) (rlhf_gpus)", (), {"rlhf_job"}),
        ("histogram_quantile(0.9, sum by (le) (rate(rlhf_response_tokens_bucket[1m])))", (("tokens", 1),), set()),
        ("rate(rlhf_response_tokens_count[1m])", (("s", -1),), {"rlhf_job"}),
        ("time() - max by (rlhf_job) (rlhf_last_progress_timestamp_seconds)", (("s", 1),), {"rlhf_job"}),
        ("count by (rlhf_job) (rlhf_fusion_pool)", (), {"rlhf_job"}),
        ("topk(3, rlhf_worker_tokens_per_second)", (("s", -1), ("tokens", 1)), {"worker"}),
        (
            "rlhf_job_phase * on (namespace, rlhf_job) group_left (queue) rlhf_job_info",
            (),
            {"phase", "queue", "rlhf_job"},
        ),
    ],
)
def test_an_answer_has_the_unit_and_the_labels_that_follow(
    expression: str, dimension: Dimension, labels: set[str]
) -> None:
    reading = READER.read(expression)
    assert reading.dimension == dimension
    assert labels <= reading.labels


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("rlhf_rewards_mean", "no process serves rlhf_rewards_mean"),
        ("sum by (worker) (rlhf_reward_mean)", "sum by ['worker'], which its series have not"),
        ("sum without (pod) (rlhf_reward_mean)", "name the labels that stay"),
        ("rlhf_reward_mean - rlhf_kl", "- of"),
        ("rlhf_gpus - rlhf_iteration", "the sides differ in ['group']: say on (...)"),
        ("rlhf_gpus - on (worker) rlhf_gpus", "on ['worker'], which not both sides have"),
        ("rlhf_gpus - ignoring (group) rlhf_iteration", "name the labels that match"),
        ("histogram_quantile(0.9, sum by (task) (rate(rlhf_scoring_latency_seconds_bucket[1m])))", "the label le"),
        ("predict_linear(rlhf_kl[1m], 60)", "predict_linear() is not read here yet"),
        ("sum(", "unclosed left parenthesis"),
    ],
)
def test_a_query_that_a_server_would_refuse_or_leave_empty_is_an_error(expression: str, words: str) -> None:
    with pytest.raises(ValueError) as refused:
        READER.read(expression)
    assert words in str(refused.value)
