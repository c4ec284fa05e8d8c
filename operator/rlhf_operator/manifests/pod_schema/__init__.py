"""The pod template as the API server describes it, for checks without a cluster: `schema.json`, and who reads it.

Rule: what is known of pods here was generated from an API server's OpenAPI (`generate`), never written by hand.
"""

from rlhf_operator.manifests.pod_schema.check import KUBERNETES, problems_of

__all__ = ["KUBERNETES", "problems_of"]
