"""Renders an RLHFJob to Kubernetes objects as plain dicts."""

from rlhf_operator.manifests.rendering import Images, RenderedObjects, render
from rlhf_operator.manifests.template import TemplateError

__all__ = ["Images", "RenderedObjects", "TemplateError", "render"]
