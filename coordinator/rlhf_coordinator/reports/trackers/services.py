"""The services that a manifest names as trackers, and the settings that each gets.

To add one, add its fields to `rlhf_api.job.trackers`, its settings here, and its run to `service_process`.
"""

from typing import Any

from rlhf_api.job import RLHFJob

Settings = dict[str, Any]


def services_of(job: RLHFJob) -> dict[str, Settings]:
    """Return kind of service -> its settings, without Secrets; empty where the manifest names none."""
    given, spec = job.spec.trackers, job.spec
    facts = {
        "algorithm": spec.algorithm.name,
        "iterations": spec.iterations,
        "seed": spec.seed,
        "batchSize": spec.rollout.batch_size,
        "learningRate": spec.training.optimizer.learning_rate,
    }
    about: Settings = {"name": job.name, "tags": [spec.algorithm.name], "facts": facts}
    services: dict[str, Settings] = {}
    if given.wandb is not None:
        own = {"project": given.wandb.project, "entity": given.wandb.entity, "mode": given.wandb.mode.lower()}
        services["wandb"] = about | own
    if given.mlflow is not None:
        services["mlflow"] = about | {"uri": given.mlflow.uri, "experiment": given.mlflow.experiment}
    return services
