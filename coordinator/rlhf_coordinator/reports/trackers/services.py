"""The services that a manifest names as trackers, and the settings that each gets.

To add one, add its fields to `rlhf_api.job.trackers`, its settings here, and its run to `service_process`.
"""

from typing import Any

from rlhf_api.job import RLHFJob

Settings = dict[str, Any]


def services_of(job: RLHFJob) -> dict[str, Settings]:
    """Return kind of service -> its settings; empty where the manifest names none."""
    trackers, spec = job.spec.trackers, job.spec
    facts = {
        "algorithm": spec.algorithm.name,
        "iterations": spec.iterations,
        "seed": spec.seed,
        "batchSize": spec.rollout.batch_size,
        "learningRate": spec.training.optimizer.learning_rate,
    }
    about: Settings = {"name": job.name, "tags": [spec.algorithm.name], "facts": facts}
    services: dict[str, Settings] = {}
    if trackers.wandb is not None:
        own = {"project": trackers.wandb.project, "entity": trackers.wandb.entity, "mode": trackers.wandb.mode.lower()}
        services["wandb"] = about | own
    if trackers.mlflow is not None:
        services["mlflow"] = about | {"uri": trackers.mlflow.uri, "experiment": trackers.mlflow.experiment}
    return services
