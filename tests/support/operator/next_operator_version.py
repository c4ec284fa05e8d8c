"""The operator of a next version, inside a test: one more field, other defaults, other pods, other fingerprints.

It changes what a release of this project may change, to test that running jobs are not affected.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rlhf_api import structural_schema
from rlhf_api.job import RLHFJob, RLHFJobSpec
from rlhf_api.job.groups import Generation
from rlhf_api.job.rollout import Rollout
from rlhf_operator.manifests import Images, rendering
from rlhf_operator.reconcile import parsed_job
from rlhf_operator.reconcile.revisions import pinning

IMAGES = Images("example.org/operator:next", "example.org/worker:next")
FIELD = "newField"


def forget() -> None:
    """Clear the caches of the other version."""
    structural_schema.job_schema.cache_clear()
    parsed_job._parse.cache_clear()
    pinning._started.cache_clear()
    pinning._from_stored.cache_clear()


def rebuild(*models: type[BaseModel]) -> None:
    above: tuple[type[BaseModel], ...] = (RLHFJobSpec, RLHFJob)
    for item in (*models, *above):
        item.model_rebuild(force=True)


@contextmanager
def next_version() -> Iterator[Images]:
    """Use the next version inside the block; yield its images."""
    fields = Rollout.__pydantic_fields__
    batch = Generation.__pydantic_fields__["max_batch_size"]
    before = batch.default
    with pytest.MonkeyPatch.context() as patch:
        new = FieldInfo.from_annotated_attribute(str, "Auto")
        new.alias = new.validation_alias = new.serialization_alias = FIELD
        fields["new_field"] = new
        batch.default = before * 2
        rebuild(Rollout, Generation)
        of_before = rendering.template_hash
        reversed_hash = lambda job, group: of_before(job, group)[::-1]  # noqa: E731
        patch.setattr(rendering, "template_hash", reversed_hash)
        patch.setattr(pinning, "template_hash", reversed_hash)
        for name in ("worker_pod", "coordinator_pod"):
            patch.setattr(rendering, name, _changed(getattr(rendering, name)))
        forget()
        try:
            yield IMAGES
        finally:
            del fields["new_field"]
            batch.default = before
            rebuild(Rollout, Generation)
            forget()


def _changed(make: Any) -> Any:
    """Return pods with larger requests, another command and one more variable."""

    def changed_pod(*arguments: Any) -> dict[str, Any]:
        pod: dict[str, Any] = make(*arguments)
        [container] = pod["spec"]["containers"]
        container["command"] = ["next"]
        container["env"].append({"name": "RLHF_NEXT", "value": "1"})
        container["resources"]["requests"]["memory"] = "2Gi"
        return pod

    return changed_pod
