"""Vocabulary of drafts: the policy's, as wide as its logits."""

from transformers import AutoConfig

from rlhf_api.algorithms.graph import GENERATE
from rlhf_api.job import RLHFJobSpec
from rlhf_workers.models.loading import model_folder


def policy_vocabulary(spec: RLHFJobSpec) -> int:
    """Return the width of the policy's logits."""
    folder = model_folder(spec.models.actor.path, f"{GENERATE.model.manifest_path}.path")
    width: int = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config().vocab_size
    return width
