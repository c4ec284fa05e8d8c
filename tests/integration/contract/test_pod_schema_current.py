"""The pod schema shipped for `rlhf validate` is that of the API server of these tests."""

import json

from tests.cluster import Cluster

from rlhf_operator.manifests.pod_schema import generate


def test_the_shipped_pod_schema_is_current(api_cluster: Cluster) -> None:
    openapi = json.loads(api_cluster.kubectl("get", "--raw", "/openapi/v3/api/v1"))
    version = json.loads(api_cluster.kubectl("get", "--raw", "/version"))
    served = generate.generate(openapi, f"v{version['major']}.{version['minor']}")
    assert generate.text(served) == generate.PATH.read_text(), "run `make pod-schema`"
