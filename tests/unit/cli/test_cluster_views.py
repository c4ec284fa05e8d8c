"""Output of get, describe, top and logs for jobs as a real API server returned them."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from tests.support.operator.seen_job import STATES, details_of, load

from rlhf_api.job.status import PlanStatus, RLHFJobStatus
from rlhf_cli.cluster import describe
from rlhf_cli.cluster.cluster_job import ClusterJob, shortened, similar_names
from rlhf_cli.cluster.explain import explanation
from rlhf_cli.cluster.get import job_table, object_text, phase_text
from rlhf_cli.cluster.job_details import PastIteration, as_metrics, parse_iterations
from rlhf_cli.cluster.job_summary import summarize
from rlhf_cli.cluster.log_lines import in_order, line_text, parse_line
from rlhf_cli.cluster.top import status_from_job, status_from_metrics
from rlhf_cli.console import columns
from rlhf_cli.live_view import render
from rlhf_operator.reconcile import job_status
from rlhf_operator.reconcile.observed.observed_job import CoordinatorReading


def text_of(seen: dict[str, Any], width: int | None = None) -> str:
    details, now = details_of(seen)
    return "\n".join(line.plain for line in describe.description(details, now, width))


def first_summarize(seen: dict[str, Any]) -> str:
    return text_of(seen).partition("\n")[0]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("running", ["Running iteration 157 of 100000: generating", "left"]),
        ("stopping", ["Stopping, because spec.suspend is true", "saves a checkpoint"]),
        (
            "suspended",
            ["Suspended at 167/100000 iterations", "continues from its last checkpoint", "`rlhf resume tiny`"],
        ),
        ("image", ["cannot get the image", "correct the image, or give imagePullSecrets"]),
        ("unschedulable", ["no node can take stuck-generation-0", "didn't match", "lower spec.generation.replicas"]),
        ("mount", ["FailedMount", 'configmap "tokens" not found', "create the volume, Secret or ConfigMap"]),
        ("failed", ["Failed (BadPrompts)", "/data/nothing.jsonl", "Correct spec.prompts", "create a new job"]),
    ],
)
def test_the_first_sentence_says_what_it_waits_for_and_what_to_do(state: str, words: list[str]) -> None:
    said = first_summarize(load(state))
    assert all(word in said for word in words), said


def loss_line(number: int, iteration: int, words: str) -> str:
    return json.dumps({"time": "2026-08-22T10:00:00Z", "message": f"loss {number} of iteration {iteration}: {words}"})


def test_what_the_coordinator_said_last_of_losses_is_described_and_explained() -> None:
    seen = load("running")
    assert "Largest losses" not in text_of(seen)
    details, _ = details_of(seen)
    assert "has logged no losses" in explanation(details, None)[0].plain
    seen["log"] += [loss_line(1, 7, "old: gone"), loss_line(2, 7, "older: gone")]
    seen["log"] += [loss_line(1, 9, "long tail: 38% waits"), loss_line(2, 9, "checkpoints: 5%")]
    text = text_of(seen)
    assert text.index("Largest losses") < text.index("1. long tail: 38% waits") < text.index("2. checkpoints: 5%")
    assert "gone" not in text
    details, _ = details_of(seen)
    assert [line.plain for line in explanation(details, None)] == ["1. long tail: 38% waits", "2. checkpoints: 5%"]


@pytest.mark.parametrize("losses", [[], [loss_line(1, 9, "long tail: 38% waits")]])
def test_explain_ends_with_the_decisions_of_the_coordinator(losses: list[str]) -> None:
    seen = load("running")
    seen["log"] += losses
    before = [line.plain for line in explanation(details_of(seen)[0], None)]
    seen["job"]["status"]["plan"] = {"engine": "torch", "longRounds": "no long rounds: tails are short", "drift": "off"}
    assert [line.plain for line in explanation(details_of(seen)[0], None)] == [
        *before,
        "rounds: no long rounds: tails are short",
        "plan for spec.devices: off",
    ]
    assert "no long rounds: tails are short" in text_of(seen)


def test_a_pod_behind_a_scheduling_gate_names_the_gate_and_not_the_scheduler() -> None:
    seen = load("unschedulable")
    for body in seen["pods"]:
        if not body["spec"].get("nodeName"):
            body["spec"]["schedulingGates"] = [{"name": "quota.example.org/approved"}]
            body["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]
    text = " ".join(text_of(seen).split())
    assert "SchedulingGated" in text
    assert "scheduling gate quota.example.org/approved keeps it from being scheduled: the controller" in text
    assert "see that the cluster's scheduler runs" not in text


def test_a_pod_that_a_finalizer_keeps_names_it() -> None:
    seen = load("running")
    seen["pods"][1]["metadata"] |= {
        "deletionTimestamp": "2026-11-21T14:00:00Z",
        "deletionGracePeriodSeconds": 0,
        "finalizers": ["example.org/audit"],
    }
    text = " ".join(text_of(seen).split())
    assert "it cannot be removed: finalizer example.org/audit of another controller keeps a deleted object" in text


def test_a_job_no_operator_looked_at_says_so_and_one_that_is_new_waits() -> None:
    seen = load("running")
    del seen["job"]["status"]
    assert "No operator has looked at it since it was created" in first_summarize(seen)
    seen["job"]["spec"]["operatorClass"] = "blue"
    assert "No operator of class blue, which spec.operatorClass names, has looked at it" in first_summarize(seen)
    assert "--operator-class=blue" in first_summarize(seen)
    seen["now"] = seen["job"]["metadata"]["creationTimestamp"]
    assert "Just created" in first_summarize(seen)


def test_an_operator_that_died_a_changed_manifest_and_a_deletion_are_told() -> None:
    seen = load("running")
    details, now = details_of(seen)
    assert "Its Lease" not in summarize(details.job, details.pods, None, now)
    assert "The operator does not run (its Lease is 10m 00s old)" in summarize(
        details.job, details.pods, timedelta(minutes=10), now
    )
    seen["job"]["metadata"]["generation"] += 1
    assert "the operator has not looked at the change yet" in first_summarize(seen)
    seen["job"]["metadata"]["deletionTimestamp"] = seen["now"]
    assert first_summarize(seen) == "Being deleted; 6 of its pods are left."


def test_a_manifest_that_cannot_be_run_says_why() -> None:
    seen = load("running")
    planned = seen["job"]["status"]["conditions"][0]
    planned |= {"status": "False", "reason": "InvalidManifest", "message": "spec.x = 1: must be 2"}
    assert first_summarize(seen).startswith(
        "The manifest cannot be run: spec.x = 1: must be 2. Running pods continue. Correct it"
    )


def test_a_job_in_a_queue_says_what_the_queue_says() -> None:
    seen = load("running")
    conditions = seen["job"]["status"]["conditions"]
    conditions[1] |= {"status": "False", "reason": "WaitingForQuota", "message": "queue team has 2 of 8 GPUs free"}
    conditions[2] |= {"status": "False", "reason": "Queued", "message": "waits for admission"}
    assert first_summarize(seen) == "Queued: waits for admission. Queue team has 2 of 8 GPUs free."


def test_a_complete_job_names_its_model() -> None:
    seen = load("running")
    status = seen["job"]["status"]
    status["conditions"][5]["status"] = "True"
    status["completionTime"] = "2026-11-21T14:50:59Z"
    said = first_summarize(seen)
    assert said.startswith("Complete: 100000 iterations in 9m 00s, last reward")
    assert "The model is /data/checkpoints/iteration-000" in said
    assert said.endswith("/actor.")


def test_describe_shows_conditions_groups_pods_and_iterations_with_their_stages() -> None:
    text = text_of(load("running"))
    for expected in (
        "demo/tiny",
        "AtDesiredSize",
        "generation    2/2",
        "inference-0    Ready   n1",
        "after 156 iterations",
        "GENERATING   SCORING   TRAINING   PUBLISHING",
        "under way",
        "iteration 1 of 100000: generating",
    ):
        assert expected in text, text
    assert "Container created" not in text


def test_a_job_without_rewards_is_shown_by_its_loss() -> None:
    seen = load("running")
    status = seen["job"]["status"]
    for name in ("reward", "kl"):
        del status["progress"][name]
    status["progress"]["loss"] = 0.69314
    assert "156/100000 iterations, loss 0.6931, 9.6 samples/s" in text_of(seen)
    status["conditions"][5]["status"] = "True"
    status["completionTime"] = "2026-11-21T14:50:59Z"
    assert ", last loss 0.6931, " in first_summarize(seen)


def test_describe_says_which_engine_decodes_and_why() -> None:
    seen = load("running")
    assert "Engine" not in text_of(seen)
    seen["job"]["status"]["plan"] = {
        "engine": "torch: the worker has no GPU",
        "interStage": "no fusion",
        "speculationSwitched": "iteration 4: speculation is off",
    }
    shown = text_of(seen).splitlines()
    assert ["Engine", "torch: the worker has no GPU"] in [line.split(maxsplit=1) for line in shown]
    assert any("Drafting switched" in line and "iteration 4: speculation is off" in line for line in shown)


def test_describe_reads_the_parts_of_the_plan_that_the_operator_writes() -> None:
    reading = CoordinatorReading(
        datetime(2026, 11, 21, tzinfo=UTC),
        "Generating",
        1,
        2,
        engines={"torch": 1},
        fusion="no fusion",
        speculation="off",
        speculation_switched="never",
        predicted_seconds=1.0,
        plan_drift="predictions are off",
        long_rounds="tails are short",
    )
    written = set(job_status._plan(reading) or {})
    assert set(describe._PLANNED.values()) <= written
    assert written | {"devices"} == {field.alias for field in PlanStatus.model_fields.values()}
    older = {"plan": {"engine": "torch", "intraStage": "serial-1f1b"}}
    assert RLHFJobStatus.model_validate(older).plan == PlanStatus(engine="torch")


def test_one_cause_of_many_pods_is_told_once() -> None:
    text = text_of(load("image"))
    assert text.count("as generation-0") == 2
    assert "ImagePullBackOff" in text


def test_a_pod_no_scheduler_looks_at_says_so_after_a_while() -> None:
    seen = load("running")
    for pod in seen["pods"]:
        pod["spec"], pod["status"] = {}, {"phase": "Pending"}
    assert "no scheduler has looked at it" in text_of(seen)
    seen["now"] = seen["pods"][0]["metadata"]["creationTimestamp"]
    assert "no scheduler" not in text_of(seen)


def test_a_container_that_crashes_says_how_and_where_to_look() -> None:
    seen = load("running")
    ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled", "containerID": "containerd://abc"}}
    state = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}
    pod = next(pod for pod in seen["pods"] if pod["metadata"]["name"] == "tiny-generation-1")
    pod["status"]["containerStatuses"] = [{"name": "worker", "restartCount": 4, "state": state, "lastState": ended}]
    pod["status"]["conditions"] = []
    text = text_of(seen)
    assert "CrashLoopBackOff" in text
    assert "raise resources.limits.memory in its pod template; `rlhf logs --previous`" in text


def test_an_init_container_that_runs_is_named_with_how_to_see_what_it_does() -> None:
    seen = load("image")
    status = seen["pods"][0]["status"]
    status["containerStatuses"] = [{"name": "worker", "state": {"waiting": {"reason": "PodInitializing"}}}]
    running = {"running": {"startedAt": "2026-08-22T10:00:05Z"}}
    status["initContainerStatuses"] = [{"name": "fetch", "state": running}]
    text = text_of(seen)
    assert "Init:Running" in text
    assert "its init container fetch runs since 2026-08-22T10:00:05Z; `kubectl logs -c fetch` shows it" in text


def test_pods_in_trouble_come_first_when_there_are_many() -> None:
    seen = load("unschedulable")
    template = next(pod for pod in seen["pods"] if pod["metadata"]["name"] == "stuck-coordinator")
    for number in range(1, 40):
        name = f"stuck-inference-{number}"
        labels = template["metadata"]["labels"] | {"rlhf.dev/group": "inference", "rlhf.dev/index": str(number)}
        seen["pods"].append(
            template | {"metadata": template["metadata"] | {"name": name, "uid": name, "labels": labels}}
        )
    text = text_of(seen)
    pods = text[text.index("\nPods\n") : text.index("\nEvents\n")]
    assert pods.index("generation-0") < pods.index("coordinator")
    assert "and 27 more, 27 of them well" in pods


def test_a_cut_list_of_events_says_how_many_more_there_are() -> None:
    seen = load("image")
    template = next(event for event in seen["events"] if event["type"] == "Warning")
    seen["events"] = [template | {"reason": f"Reason{number}"} for number in range(describe.EVENTS_SHOWN)]
    assert "more" not in events_section(seen)
    seen["events"] += [template | {"reason": f"Other{number}"} for number in range(3)]
    assert events_section(seen).splitlines()[-1] == "  and 3 more, all earlier"


def events_section(seen: dict[str, Any]) -> str:
    return text_of(seen).partition("\nEvents\n")[2].partition("\n\n")[0]


def test_a_cut_list_of_iterations_says_how_many_more_there_are() -> None:
    details, now = details_of(load("running"))

    def shown(count: int) -> str:
        past = [PastIteration(number, seconds=1.0) for number in range(count)]
        text = "\n".join(line.plain for line in describe.description(replace(details, iterations=past), now, None))
        return text.partition("\nLast iterations\n")[2].partition("\n\n")[0]

    assert "more" not in shown(describe.ITERATIONS_SHOWN)
    assert shown(describe.ITERATIONS_SHOWN + 2).splitlines()[-1] == "  and 2 more, all earlier"


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("width", [80, 140])
def test_a_terminal_is_not_overrun(state: str, width: int) -> None:
    seen = load(state)
    details, now = details_of(seen)
    lines = describe.description(details, now, width)
    assert [line.plain for line in lines if cell_len(line.plain) > width] == []
    table = job_table([details.job], now, width, namespaces=True, wide=True)
    assert all(cell_len(line.plain) <= width for line in table)


def test_get_shows_progress_and_leaves_out_what_nobody_has() -> None:
    jobs = [ClusterJob(load(state)["job"]) for state in ("running", "failed", "suspended")]
    _, now = details_of(load("running"))
    heading, running, failed, suspended = (line.plain for line in job_table(jobs, now, None))
    assert heading.split() == ["NAME", "ALGORITHM", "PHASE", "ITERATION", "REWARD", "SAMPLES/S", "LEFT", "AGE"]
    assert running.split()[:6] == ["tiny", "ppo", "Running", "156/100000", "1.000", "9.6"]
    assert "Failed" in failed
    assert "Suspended" in suspended
    assert job_table([], now, None) == []
    wide = job_table(jobs[:1], now, None, wide=True)
    assert "5/5" in wide[1].plain
    assert "iteration" in wide[1].plain


def test_an_invalid_manifest_shows_in_the_table() -> None:
    seen = load("running")
    status = seen["job"]["status"]
    status["conditions"][0] |= {"status": "False", "reason": "InvalidManifest"}
    status["conditions"][2]["reason"] = "Pending"
    assert phase_text(ClusterJob(seen["job"])).plain == "InvalidManifest"


def test_objects_are_printed_without_managed_fields() -> None:
    body = load("running")["job"]
    body["metadata"]["managedFields"] = [{"manager": "x"}]
    text = object_text({"kind": "List", "items": [body]}, "yaml")
    assert "managedFields" not in text
    assert yaml.safe_load(text)["items"][0]["metadata"]["name"] == "tiny"


def drawn(renderable: Any) -> str:
    console = Console(width=120, force_terminal=False)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_top_shows_the_metrics_of_the_coordinator_as_rlhf_run_does() -> None:
    seen = load("running")
    details, _ = details_of(seen)
    status = status_from_metrics("\n".join(seen["metrics"]) + "\n", details.job, details.pods)
    assert {worker.worker for worker in status.workers} == {
        "generation-0",
        "generation-1",
        "inference-0",
        "training-0",
        "training-1",
    }
    assert sum(status.ledger.values()) == 16
    text = drawn(render(status, as_metrics(details.iterations), []))
    assert "167 of 100000 iterations" in text
    assert "/16 samples" in text
    assert "reward" in text
    assert "busy" not in text


def test_top_shows_where_the_long_tail_is() -> None:
    seen = load("running")
    details, _ = details_of(seen)
    page = [
        *seen["metrics"],
        "rlhf_fusion_threshold 6",
        'rlhf_fusion_pool{worker="generation-1"} 1',
    ]
    page.append('rlhf_fusion_released{worker="generation-0"} 1')
    text = drawn(render(status_from_metrics("\n".join(page) + "\n", details.job, details.pods), [], []))
    assert "pool 1/2, 1 workers score" in text
    assert "generation-1 (pool)" in text


def test_top_without_metrics_shows_the_status_and_the_pods() -> None:
    details, _ = details_of(load("image"))
    text = drawn(render(status_from_job(details.job, details.pods), [], []))
    assert "ImagePullBackOff" in text
    assert "as generation-0" in text
    assert "0/0 samples" not in text
    failed, _ = details_of(load("failed"))
    assert "BadPrompts" in drawn(render(status_from_job(failed.job, failed.pods), [], []))


def test_lines_of_several_pods_are_in_order_of_time_and_those_of_one_pod_stay() -> None:
    first = [
        parse_line("a", b"2026-01-01T00:00:01.123456789Z one"),
        parse_line("a", b"2026-01-01T00:00:03Z three"),
        parse_line("a", b"x"),
    ]
    second = [parse_line("b", b"2026-01-01T00:00:02.5Z two")]
    assert [line.text for line in in_order([first, second])] == ["one", "two", "three", "x"]


def test_a_line_of_ours_is_shown_as_time_level_message_and_others_as_they_are() -> None:
    fields = {"time": "2026-01-01T10:20:30.5+00:00", "level": "ERROR", "message": "no [room]", "traceback": "T"}
    entry = json.dumps(fields).encode()
    assert line_text(parse_line("a-0", b"2026-01-01T00:00:01Z " + entry), "cyan", 6).plain == (
        "a-0     10:20:30 ERROR no [room]\nT"
    )
    for raw in (b"plain [bold] text", b"[1, 2]", b'{"level": 3}', b"\xff"):
        assert line_text(parse_line("a", raw), "cyan", 0).plain == raw.decode(errors="replace")


@given(st.lists(st.tuples(*[st.text(max_size=12)] * 3), min_size=1, max_size=6), st.integers(30, 90))
def test_columns_line_up_and_fit(rows: list[tuple[str, str, str]], width: int) -> None:
    clean = [[cell.replace("\n", " ") for cell in row] for row in rows]
    for line in columns([["A", "B", "C"], *clean], width):
        assert cell_len(line.plain) <= width


def test_a_long_last_column_goes_on_below_itself() -> None:
    lines = [line.plain for line in columns([["A", "B"], ["x", "one two three four five six seven"]], 30, wrap=True)]
    assert lines == ["A   B", "x   one two three four five", "    six seven"]


def test_similar_names_names() -> None:
    assert similar_names("arithmetc", ["arithmetic", "other"]) == ["arithmetic"]
    assert similar_names("tiny", ["tiny-2", "zzz"]) == ["tiny-2"]
    assert similar_names("q", ["arithmetic"]) == []


@given(st.text(max_size=500))
def test_what_is_shortened_is_short(text: str) -> None:
    assert len(shortened(text, 100)) <= 100


def test_iterations_have_the_number_that_they_have_in_files() -> None:
    closed = "iteration 72 (73 of 100)"
    messages = ["Generating (iteration 72)", f"{closed}: reward 0.5, 8.0 samples/s, 2.0 s", "Generating (iteration 73)"]
    seconds = enumerate(messages)
    lines = [json.dumps({"time": f"2026-01-01T00:00:0{at}+00:00", "level": "INFO", "message": m}) for at, m in seconds]
    found = parse_iterations(lines)
    assert [(iteration.number, iteration.reward, iteration.seconds) for iteration in found] == [
        (72, 0.5, 2.0),
        (73, None, None),
    ]
    assert [line["iteration"] for line in as_metrics(found)] == [72]


def test_a_page_whose_series_lack_a_label_is_no_page_of_a_coordinator() -> None:
    details, _ = details_of(load("running"))
    with pytest.raises(ValueError, match="has no label 'phase'"):
        status_from_metrics("rlhf_phase 1\n", details.job, details.pods)
