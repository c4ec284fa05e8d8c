"""The API server's schema of pod templates (`schema.json`) and its check, for use without a cluster."""

from rlhf_operator.manifests.pod_schema.check import KUBERNETES, problems_of

__all__ = ["KUBERNETES", "problems_of"]
