"""Diagnostics of frequent mistakes: each has its cause and a remedy, with messages of a real cluster."""

from typing import Any

import pytest
from tests.support.operator.simulated_cluster import SimulatedCluster

RESTRICTED = (
    'pods "job-generation-0" is forbidden: violates PodSecurity "restricted:latest": hostNetwork (pod must not set '
    "spec.securityContext.hostNetwork=true)"
)
NO_ACCOUNT = (
    'pods "job-generation-0" is forbidden: error looking up service account team/nosuch: serviceaccount "nosuch" not '
    "found"
)
CLAIM = "see that the claim exists in namespace team and can be bound (kubectl get pvc)"


def begun(**spec: Any) -> SimulatedCluster:
    cluster = SimulatedCluster(**spec)
    cluster.settle()
    return cluster


def mounting(**volume: Any) -> dict[str, Any]:
    return {"template": {"spec": {"volumes": [{"name": "data", **volume}]}}}


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("0/3 nodes are available: 3 Insufficient nvidia.com/gpu.", "add nodes, free some, or lower spec.generation."),
        (
            '0/1 nodes are available: persistentvolumeclaim "nosuch" not found. not found',
            f"{CLAIM}, or correct the volumes of the pod template",
        ),
        (
            "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims.",
            CLAIM,
        ),
        (
            "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector.",
            "correct nodeSelector or affinity in spec.generation.template, or label a node so",
        ),
        (
            "0/2 nodes are available: 2 node(s) had untolerated taint {gpu: true}.",
            "add a toleration to spec.generation.template",
        ),
    ],
)
def test_the_remedy_follows_the_schedulers_words(words: str, remedy: str) -> None:
    cluster = begun()
    cluster.cannot_schedule("generation-0", words)
    cluster.later(11)
    cluster.settle()
    assert cluster.phase == "Unschedulable"
    assert f"no node can take job-generation-0 ({words.rstrip('.')}): {remedy}" in cluster.running_message


TAINT = "node(s) had untolerated taint"


@pytest.mark.parametrize(
    ("words", "remedies"),
    [
        (
            (
                f"0/5 nodes are available: 1 {TAINT} {{node-role.kubernetes.io/control-plane: }}, "
                f"1 {TAINT} {{node.kubernetes.io/unreachable: }}, 3 Insufficient nvidia.com/gpu"
            ),
            "add nodes, free some, or lower spec.generation.replicas. ",
        ),
        (
            "0/5 nodes are available: 2 node(s) didn't match Pod's node affinity/selector, 3 Insufficient cpu",
            "add nodes, free some, or lower spec.generation.replicas. ",
        ),
        (
            f"0/5 nodes are available: 2 Insufficient nvidia.com/gpu, 3 {TAINT} {{nvidia.com/gpu: }}",
            (
                "add nodes, free some, or lower spec.generation.replicas; "
                "add a toleration to spec.generation.template, "
                "where the taint nvidia.com/gpu is meant for such pods. "
            ),
        ),
        (
            (
                f"0/5 nodes are available: 1 {TAINT} {{node-role.kubernetes.io/control-plane: }}, "
                "4 node(s) didn't match Pod's node affinity/selector"
            ),
            "correct nodeSelector or affinity in spec.generation.template, or label a node so. ",
        ),
        (
            "0/1 nodes are available: 1 node(s) had untolerated taint {node.kubernetes.io/not-ready: }",
            "add nodes, free some, or lower spec.generation.replicas. ",
        ),
    ],
)
def test_the_remedy_is_not_that_of_nodes_which_the_pod_is_not_meant_for(words: str, remedies: str) -> None:
    cluster = begun()
    cluster.cannot_schedule("generation-0", words)
    cluster.later(11)
    cluster.settle()
    assert f"no node can take job-generation-0 ({words}): {remedies}" in cluster.running_message


IMAGE = "Back-off pulling image: not found"


def test_the_default_image_is_corrected_where_the_operator_is_installed() -> None:
    cluster = begun()
    cluster.wait_with("generation-0", "ImagePullBackOff", IMAGE)
    cluster.later(11)
    cluster.settle()
    assert cluster.running_message.startswith(
        f"job-generation-0 cannot get the image ({IMAGE}): spec.generation.template names none, so it is the "
        "operator's default: push it there, or have the operator installed with one that is there (image.registry of "
        "the chart; it holds for jobs that start anew), or name one in spec.generation.template. "
    )


def test_an_image_of_the_template_is_corrected_there() -> None:
    template = {"spec": {"containers": [{"name": "worker", "image": "mine:1"}]}}
    cluster = begun(generation={"replicas": 2, "template": template})
    cluster.wait_with("generation-0", "ImagePullBackOff", IMAGE)
    cluster.later(11)
    cluster.settle()
    remedy = "correct the image in spec.generation.template, or give imagePullSecrets there. "
    assert cluster.running_message.startswith(f"job-generation-0 cannot get the image ({IMAGE}): {remedy}")


def test_default_images_and_those_of_templates_have_a_sentence_each() -> None:
    template = {"spec": {"containers": [{"name": "worker", "image": "mine:1"}]}}
    cluster = begun(inference={"replicas": 1, "template": template})
    cluster.wait_with("generation-0", "ImagePullBackOff", IMAGE)
    cluster.wait_with("inference-0", "ImagePullBackOff", "mine:1: denied")
    cluster.later(11)
    cluster.settle()
    said = cluster.running_message
    assert f"job-generation-0 cannot get the image ({IMAGE}): spec.generation.template names none" in said
    assert "job-inference-0 cannot get the image (mine:1: denied): correct the image in spec.inference.template" in said


def initializing(cluster: SimulatedCluster, worker: str, *inits: dict[str, Any]) -> None:
    waiting = {"state": {"waiting": {"reason": "PodInitializing"}}}
    status = cluster.pods[f"job-{worker}"]["status"]
    status["initContainerStatuses"] = list(inits)
    proxies = [{"name": each["name"], "restartPolicy": "Always"} for each in inits if each["name"] == "proxy"]
    cluster.pods[f"job-{worker}"]["spec"]["initContainers"] = proxies
    status["containerStatuses"] = [{"name": "worker", **waiting}]


def test_an_init_container_that_runs_is_named_with_its_pod() -> None:
    cluster = begun()
    running = {"running": {"startedAt": "2026-08-22T10:00:05Z"}}
    done = {"name": "certs", "ready": True, "state": {"terminated": {"exitCode": 0}}}
    sidecar = {"name": "proxy", "started": True, "state": running}
    later = {"name": "unpack", "state": {"waiting": {"reason": "PodInitializing"}}}
    for worker in ("generation-0", "generation-1"):
        initializing(cluster, worker, done, sidecar, {"name": "fetch", "started": True, "state": running}, later)
    cluster.later(11)
    cluster.settle()
    assert cluster.running_message.startswith(
        "job-generation-0, job-generation-1 wait for their init container fetch, which runs since "
        "2026-08-22T10:00:05Z: `kubectl logs job-generation-0 -c fetch` says what it does. 0 of 6 pods are ready"
    )


def test_an_init_container_that_waits_is_named_with_its_pod() -> None:
    cluster = begun()
    done = {"name": "certs", "ready": True, "state": {"terminated": {"exitCode": 0}}}
    pulling = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image x"}}
    initializing(cluster, "generation-0", done, {"name": "fetch", "state": pulling})
    cluster.later(11)
    cluster.settle()
    words = "job-generation-0 cannot get the image (init container fetch: Back-off pulling image x): correct the image"
    assert cluster.running_message.startswith(words)


def test_causes_that_differ_are_told_each_and_causes_that_come_together_have_both_remedies() -> None:
    cluster = begun()
    cluster.cannot_schedule(
        "generation-0", "0/2 nodes are available: 1 Insufficient cpu, 1 node(s) had untolerated taint"
    )
    cluster.cannot_schedule("training-0", 'persistentvolumeclaim "nosuch" not found')
    cluster.later(11)
    cluster.settle()
    assert "or lower spec.generation.replicas; add a toleration to spec.generation.template" in cluster.running_message
    assert "or correct the volumes of the pod template" in cluster.running_message


def test_words_about_other_pods_are_left_out_and_every_group_is_named() -> None:
    cluster = begun()
    words = (
        "0/1 nodes are available: 1 Insufficient cpu. no new claims to deallocate, preemption: 0/1 nodes are available."
    )
    for worker in ("generation-0", "inference-0"):
        cluster.cannot_schedule(worker, words)
    cluster.later(11)
    cluster.settle()
    assert cluster.running_message.startswith(
        "no node can take job-generation-0, job-inference-0 (0/1 nodes are available: 1 Insufficient cpu): "
        "add nodes, free some, or lower spec.generation.replicas or spec.inference.replicas. "
    )


def test_an_image_without_what_it_is_to_run_is_named_as_the_cause() -> None:
    cluster = begun()
    cluster.run()
    words = 'runc create failed: exec: "python": executable file not found in $PATH'
    cluster.end("coordinator", 128, reason="StartError", message=words)
    cluster.later(11)
    cluster.settle()
    assert cluster.job["status"]["restarts"]["lastReason"] == (
        f"job-coordinator: its container cannot be started ({words}): use an image with the container's command"
    )


@pytest.mark.parametrize(
    ("why", "remedy"),
    [
        (
            NO_ACCOUNT,
            "create it in namespace team, or correct serviceAccountName in the pod template",
        ),
        (RESTRICTED, "take what it names out of the pod template, or lower the Pod Security level of the namespace"),
        (
            'pods "job-generation-0" is forbidden: maximum memory usage per Container is 1Gi, but limit is 4Gi',
            "give resources in the pod template that the LimitRange of the namespace allows",
        ),
    ],
)
def test_a_pod_that_the_api_server_refuses_is_told_with_what_to_change(why: str, remedy: str) -> None:
    cluster = begun()
    del cluster.pods["job-generation-0"]
    cluster.refusals = {"job-generation-0": why}
    cluster.later(11)
    cluster.carry_out(cluster.plan())
    assert cluster.running_message.startswith(f"job-generation-0 cannot be created: {why}: {remedy}")


def test_names_that_others_have_are_told_with_both_ways_out_and_no_pod_is_made() -> None:
    cluster = SimulatedCluster()
    cluster.carry_out(cluster.plan())
    cluster.occupied = {"NetworkPolicy job": "networkpolicy/job", "Secret job-authority": "secret/job-authority"}
    cluster.later(11)
    plan = cluster.plan()
    cluster.carry_out(plan)
    result = cluster.condition("Running")
    assert (result["status"], result["reason"]) == ("False", "NameTaken")
    assert "the name of NetworkPolicy job and Secret job-authority in namespace team" in result["message"]
    assert "Give the job another name, or remove what is not needed" in result["message"]
    assert "kubectl delete networkpolicy/job secret/job-authority --namespace=team" in result["message"]
    assert "NameTaken" in cluster.events
    assert plan.requeue_after == 15
    cluster.occupied = {}
    cluster.later(15)
    cluster.settle()
    assert cluster.condition("Running")["reason"] == "Starting"


def test_a_secret_that_a_variable_needs_is_named_with_the_namespace() -> None:
    cluster = begun()
    cluster.wait_with("inference-0", "CreateContainerConfigError", 'secret "hub" not found')
    cluster.later(11)
    cluster.settle()
    assert cluster.running_message.startswith(
        'job-inference-0 cannot be started (CreateContainerConfigError: secret "hub" not found): '
        "create it in namespace team, or correct spec.inference.template"
    )


def test_a_pod_that_hangs_before_its_container_is_told_after_a_minute_with_what_it_mounts() -> None:
    cluster = begun(generation={"replicas": 2} | mounting(secret={"secretName": "hub"}))
    cluster.wait_with("generation-0", "ContainerCreating")
    cluster.later(11)
    look = cluster.settle().requeue_after
    assert look is not None
    assert "generation-0" not in cluster.running_message
    assert look == 49
    cluster.later(look)
    cluster.settle()
    assert cluster.running_message.startswith(
        "job-generation-0 got a node over 60 s ago and cannot start: the image is large, or a mounted object does "
        "not exist (secret hub); `kubectl describe pod job-generation-0` has the kubelet's words"
    )


def test_a_pod_whose_first_init_container_has_not_begun_hangs_in_the_same_way() -> None:
    cluster = begun(training=mounting(persistentVolumeClaim={"claimName": "models"}), checkpoints=None)
    waiting = {"state": {"waiting": {"reason": "PodInitializing"}}}
    cluster.wait_with("coordinator", "PodInitializing")
    cluster.pods["job-coordinator"]["status"]["initContainerStatuses"] = [{"name": "assets", **waiting}]
    cluster.later(61)
    cluster.settle()
    assert "job-coordinator got a node over 60 s ago" in cluster.running_message
    assert "(claim models)" in cluster.running_message


def test_workers_that_nobody_hears_of_point_at_the_network() -> None:
    cluster = begun()
    cluster.run()
    cluster.read("Starting", 0, waiting_for=("generation-0 to register (100 s)",))
    cluster.later(60)
    cluster.read("Starting", 0, waiting_for=("generation-0 to register (100 s)",))
    cluster.settle()
    assert "DNS" not in cluster.running_message, "they may be loading still"
    cluster.later(60)
    cluster.read("Starting", 0, waiting_for=("generation-0 to register (160 s)",))
    cluster.settle()
    assert (
        "job-generation-0, job-generation-1, job-inference-0 and 2 more run and cannot reach the coordinator"
        in cluster.running_message
    )
    assert (
        "that the cluster's DNS finds job-coordinator.job.team.svc, and that no NetworkPolicy"
        in cluster.running_message
    )
    cluster.later(11)
    cluster.read("Starting", 0, streams=1)
    cluster.settle()
    assert "DNS" not in cluster.running_message


@pytest.mark.parametrize(
    ("gate", "owner"),
    [
        ("kueue.x-k8s.io/admission", "Kueue removes it when it admits the pod's Workload: see `kubectl get workloads`"),
        ("kueue.x-k8s.io/topology", "Kueue removes it when it has chosen the pod's place in the topology"),
        ("quota.example.org/approved", "the controller of quota.example.org removes it; see that it runs"),
        ("wait", "the tool that set it removes it; see that it runs"),
    ],
)
def test_pods_behind_a_scheduling_gate_are_told_with_the_gate_and_who_removes_it(gate: str, owner: str) -> None:
    cluster = begun()
    for worker in ("generation-0", "training-1"):
        cluster.gate(worker, gate)
    assert "scheduling gate" not in cluster.running_message
    look = cluster.settle().requeue_after
    assert look is not None
    assert look <= 10
    cluster.later(look)
    cluster.settle()
    assert cluster.running_message.startswith(
        f"scheduling gate {gate} keeps job-generation-0, job-training-1 from being scheduled: {owner}"
    )
    for worker in ("generation-0", "training-1"):
        cluster.gate(worker)
    cluster.later(11)
    cluster.settle()
    assert "scheduling gate" not in cluster.running_message
