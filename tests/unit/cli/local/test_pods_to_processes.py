"""Conversion of pods to processes: fields that are rewritten, and fields that stay as in a cluster."""

import sys
from pathlib import Path

import pytest
import yaml

from rlhf_api.job import RLHFJob
from rlhf_api.manifest import resolve
from rlhf_cli.load_job import for_this_machine
from rlhf_cli.local.devices import DeviceShare, LocalMachine, allot_devices
from rlhf_cli.local.errors import RunError
from rlhf_cli.local.pods_to_processes import LocalProcess, device_demands, job_file_content, local_processes
from rlhf_cli.local.ports import JobPorts
from rlhf_cli.local.run_folder import RunPaths
from rlhf_common.names import Env, ExitCode, Group
from rlhf_operator.manifests import render

MANIFEST = """
apiVersion: rlhf.dev/v1alpha1
kind: RLHFJob
metadata: {name: local}
spec:
  algorithm: {grpo: {}}
  models: {actor: {path: policy}, reward: {function: {file: reward.py}}}
  prompts: {path: prompts.jsonl}
  generation: {replicas: 2, cpuThreads: 3}
  training: {gpusPerReplica: 1}
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text("{}")
    (tmp_path / "reward.py").write_text("")
    (tmp_path / "prompts.jsonl").write_text("")
    return tmp_path


def resolve_here(job: RLHFJob, paths: RunPaths) -> RLHFJob:
    return for_this_machine(resolve(job, paths.base), paths)


def manifest(**changes: object) -> RLHFJob:
    document = yaml.safe_load(MANIFEST)
    document["spec"].update(changes)
    return RLHFJob.model_validate(document)


def translated(
    base: Path, caller: dict[str, str], cores: frozenset[int] | None = frozenset({1}), /, **changes: object
) -> dict[str, LocalProcess]:
    objects = render(resolve_here(manifest(**changes), RunPaths(base / "run", base)), {})
    shares = {d.name: DeviceShare(cores, ("7",), 3) if d.gpus else DeviceShare(cores) for d in device_demands(objects)}
    result = local_processes(objects, RunPaths(base / "run", base), shares, JobPorts(iter(range(5000, 6000))), caller)
    return {process.name: process for process in result}


def test_every_process_of_a_split_worker_has_its_threads(base: Path) -> None:
    changes = {"generation": {"engine": "vllm", "parallelism": {"tensor": 2}, "cpuThreads": 3}}
    objects = render(resolve_here(manifest(**changes), RunPaths(base / "run", base)), {})
    assert {demand.name: demand.threads for demand in device_demands(objects)} == {
        "coordinator": 1, "generation-0": 6, "inference-0": 1, "training-0": 1
    }  # fmt: skip
    worker = translated(base, {}, **changes)["generation-0"]
    assert worker.env[Env.THREADS] == "3"
    assert not {"VLLM_CACHE_ROOT", "HF_HUB_OFFLINE"} & worker.env.keys(), "the caller's caches and hub"
    assert worker.env["VLLM_NO_USAGE_STATS"] == "1"


def test_addresses_paths_and_devices_are_local(base: Path) -> None:
    result = translated(base, {})
    assert list(result) == ["coordinator", "generation-0", "generation-1", "inference-0", "training-0"]
    coordinator, worker, rank = result["coordinator"], result["generation-1"], result["training-0"]
    assert coordinator.command == (sys.executable, "-m", "rlhf_coordinator")
    assert coordinator.env[Env.LISTEN] == worker.env[Env.COORDINATOR] == "127.0.0.1:5000"
    assert coordinator.env[Env.RUN_DIR] == str(base / "run")
    assert coordinator.env[Env.JOB_FILE] == str(base / "run" / "job.json")
    assert worker.env[Env.LISTEN] == worker.env[Env.ADVERTISE] != result["generation-0"].env[Env.LISTEN]
    assert worker.env[Env.CERTIFICATES] == str(base / "run" / "certificates")
    assert worker.env[Env.GROUP] == "generation"
    assert worker.env[Env.INDEX] == "1"
    assert worker.env[Env.THREADS] == worker.env["OMP_NUM_THREADS"] == "3"
    assert "PYTHONDONTWRITEBYTECODE" not in worker.env
    assert worker.env["CUDA_VISIBLE_DEVICES"] == ""
    assert Env.RENDEZVOUS not in worker.env
    assert Env.RENDEZVOUS_PORT not in worker.env
    assert rank.env[Env.RENDEZVOUS] == "127.0.0.1"
    assert int(rank.env[Env.RENDEZVOUS_PORT]) in range(5000, 6000)
    assert (rank.env[Env.DEVICE], rank.env["CUDA_VISIBLE_DEVICES"], rank.device) == ("cuda:0", "7", "cuda:7")
    assert rank.env[Env.DEVICE_SHARERS] == "3"
    assert rank.env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert Env.DEVICE_SHARERS not in worker.env
    assert "HOME" not in worker.env
    assert not any(".svc" in value or "/etc/rlhf" in value for p in result.values() for value in p.env.values())


def test_threads_on_shared_cores_do_not_spin_for_each_other(base: Path) -> None:
    shared = translated(base, {}, None)
    assert shared["generation-0"].env["OMP_WAIT_POLICY"] == "PASSIVE"
    assert "OMP_WAIT_POLICY" not in shared["training-0"].env, "it has one thread"
    assert "OMP_WAIT_POLICY" not in translated(base, {})["generation-0"].env, "it has cores of its own"
    assert "OMP_WAIT_POLICY" not in translated(base, {"OMP_WAIT_POLICY": "ACTIVE"}, None)["generation-0"].env


def test_the_coordinator_reads_the_job_the_pods_would_get(base: Path) -> None:
    job = RLHFJob.model_validate_json(
        job_file_content(render(resolve_here(manifest(), RunPaths(base / "run", base)), {}))
    )
    assert job.spec.models.actor.path == str(base / "policy")


def test_workers_never_compile_all_of_torch_at_every_start(base: Path) -> None:
    caller = {"PYTHONDONTWRITEBYTECODE": "1", "HOME": "/home/me"}
    env = translated(base, caller)["generation-0"].env
    assert env["PYTHONDONTWRITEBYTECODE"] == ""
    assert env["PYTHONPYCACHEPREFIX"] == "/home/me/.cache/rlhf-operator/bytecode"
    assert "PYTHONPYCACHEPREFIX" not in translated(base, {"HOME": "/home/me"})["generation-0"].env


def test_secrets_of_a_template_come_from_the_callers_environment(base: Path) -> None:
    template = {
        "spec": {
            "containers": [
                {"name": "worker", "env": [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}
            ]
        }
    }
    result = translated(base, {"TOKEN": "mine"}, inference={"template": template})
    assert result["inference-0"].env["TOKEN"] == "mine"
    with pytest.raises(RunError, match="TOKEN: key k of Secret s needs a cluster; set TOKEN"):
        translated(base, {"OTHER": ""}, inference={"template": template})


def test_demands_are_what_the_pods_ask_for(base: Path) -> None:
    result = device_demands(render(resolve_here(manifest(), RunPaths(base / "run", base)), {}))
    assert [(d.group, d.threads, d.gpus) for d in result] == [
        (Group.COORDINATOR, 1, 0),
        (Group.GENERATION, 3, 0),
        (Group.GENERATION, 3, 0),
        (Group.INFERENCE, 1, 0),
        (Group.TRAINING, 1, 1),
    ]


def test_resolving_fills_in_checkpoints_and_is_idempotent(base: Path) -> None:
    once = resolve_here(manifest(), RunPaths(base / "run", base))
    assert once.spec.checkpoints is not None
    assert once.spec.checkpoints.path == str(base / "run" / "checkpoints")
    assert once.spec.prompts.path == str(base / "prompts.jsonl")
    (reward_entry,) = once.spec.models.all_rewards
    assert reward_entry.reward.function is not None
    assert reward_entry.reward.function.file == str(base / "reward.py")
    assert resolve_here(once, RunPaths(base / "other", Path("/elsewhere"))) == once


@pytest.mark.parametrize(
    ("changes", "message", "exit_code"),
    [
        (
            {"prompts": {"path": "missing.jsonl"}},
            "spec.prompts.path = '{base}/missing.jsonl': no such file",
            ExitCode.BAD_DATA,
        ),
        (
            {"models": {"actor": {"path": "./missing"}, "reward": {"function": {"module": "m"}}}},
            "spec.models.actor.path = '{base}/missing': no such folder",
            ExitCode.BAD_MODEL,
        ),
        (
            {"models": {"actor": {"path": "."}, "reward": {"function": {"module": "m"}}}},
            "spec.models.actor.path = '{base}': the folder has no config.json",
            ExitCode.BAD_MODEL,
        ),
        (
            {"models": {"actor": {"path": "policy"}, "reward": {"function": {"file": "gone.py"}}}},
            "spec.models.reward.function.file = '{base}/gone.py': no such file",
            ExitCode.USAGE,
        ),
        (
            {"models": {"actor": {"path": "policy"}, "reward": {"function": {"configMap": "r"}}}},
            "spec.models.reward.function.configMap = 'r': there are no ConfigMaps",
            ExitCode.USAGE,
        ),
        (
            {
                "models": {"actor": {"path": "policy"}, "reward": {"environment": {}}},
                "rollout": {"environment": {"configMap": "e"}},
            },
            "spec.rollout.environment.configMap = 'e': there are no ConfigMaps",
            ExitCode.USAGE,
        ),
    ],
)
def test_what_does_not_exist_is_refused_before_anything_starts(
    base: Path, changes: dict[str, object], message: str, exit_code: ExitCode
) -> None:
    with pytest.raises(RunError) as refused:
        resolve_here(manifest(**changes), RunPaths(base / "run", base))
    assert str(refused.value).startswith(message.format(base=base))
    assert refused.value.exit_code == exit_code


def test_a_hub_id_is_left_alone(base: Path) -> None:
    job = manifest(models={"actor": {"path": "org/name"}, "reward": {"function": {"module": "m"}}})
    assert resolve_here(job, RunPaths(base / "run", base)).spec.models.actor.path == "org/name"


def test_a_pod_of_several_ranks_is_one_launcher_with_ports_and_devices_for_each(base: Path) -> None:
    training = {"parallelism": {"pipeline": 4}, "ranksPerPod": 2, "cpuThreads": 3, "gpusPerReplica": 1}
    objects = render(resolve_here(manifest(training=training), RunPaths(base / "run", base)), {})
    demands = [demand for demand in device_demands(objects) if demand.group is Group.TRAINING]
    assert [(demand.name, demand.threads, demand.gpus, demand.processes) for demand in demands] == [
        ("training-0", 6, 2, 2), ("training-1", 6, 2, 2)
    ]  # fmt: skip
    shares = {d.name: DeviceShare(None, ("4", "7") if d.gpus else ()) for d in device_demands(objects)}
    job_ports = JobPorts(iter(range(5000, 6000)))
    processes = {
        process.name: process
        for process in local_processes(objects, RunPaths(base / "run", base), shares, job_ports, {})
    }
    first, second = (processes[f"training-{pod}"].env for pod in range(2))
    assert processes["training-1"].command[1:] == ("-m", "rlhf_workers.rank_launcher")
    assert (second[Env.INDEX], second[Env.RANKS], second[Env.DEVICE]) == ("1", "2", "cuda:0,cuda:1")
    assert second["CUDA_VISIBLE_DEVICES"] == "4,7"
    assert second[Env.ADVERTISE] == second[Env.LISTEN]
    names = (Env.LISTEN, Env.RANK_METRICS, Env.RENDEZVOUS_PORT, Env.METRICS)
    every = [entry.rpartition(":")[2] for env in (first, second) for name in names for entry in env[name].split(",")]
    assert len(set(every)) == len(every) == 2 * 7
    assert processes["training-0"].endpoint == first[Env.METRICS]


def test_ranks_of_a_pod_share_the_devices_that_there_are(base: Path) -> None:
    training = {"parallelism": {"pipeline": 4}, "ranksPerPod": 4, "gpusPerReplica": 1}
    objects = render(resolve_here(manifest(training=training), RunPaths(base / "run", base)), {})
    allotted = allot_devices(device_demands(objects), LocalMachine((0, 1), ("0", "1")))
    assert allotted.shares["training-0"].gpus == ("0", "1", "0", "1")
    assert allotted.shares["training-0"].sharers == 2
    job_ports = JobPorts(iter(range(5000, 6000)))
    processes = local_processes(objects, RunPaths(base / "run", base), allotted.shares, job_ports, {})
    env = processes[-1].env
    assert (env["CUDA_VISIBLE_DEVICES"], env[Env.DEVICE]) == ("0,1", "cuda:0,cuda:1,cuda:0,cuda:1")
    assert env[Env.DEVICE_SHARERS] == "2"
    with pytest.raises(RunError, match="gpusPerReplica: 1: this machine has 0 CUDA devices"):
        allot_devices(device_demands(objects), LocalMachine((0, 1)))
