"""The API server's schema of pod templates (`schema.json`) and its check, for use without a cluster.

Rule: the schema is generated from an API server's OpenAPI (`generate`), never written by hand.
"""

from rlhf_operator.manifests.pod_schema.check import KUBERNETES, problems_of

__all__ = ["KUBERNETES", "problems_of"]
