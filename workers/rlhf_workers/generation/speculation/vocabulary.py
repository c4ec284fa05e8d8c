"""Which tokens a draft may have: those of the policy, whose logits are as wide as its folder says.

Rule: a token means what the policy's tokenizer says; who drafts by other words is refused before the first sample.
"""

from collections.abc import Mapping

from transformers import AutoConfig

from rlhf_api.algorithms.graph import GENERATE
from rlhf_api.job import RLHFJobSpec
from rlhf_workers.models import model_folder


def policy_vocabulary(spec: RLHFJobSpec) -> int:
    """Return the width of the policy's logits."""
    folder = model_folder(spec.models.actor.path, f"{GENERATE.model.manifest_path}.path")
    width: int = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config().vocab_size
    return width


def difference(ours: Mapping[str, int], wanted: Mapping[str, int]) -> str:
    """Return how the vocabulary of a draft model differs from the policy's; empty: in nothing."""
    for token, number in wanted.items():
        if ours.get(token) != number:
            said = "does not have it" if token not in ours else f"gives it the number {ours[token]}"
            return f"the policy's token {number} is {token!r}, and its tokenizer {said}"
    extra = next((token for token in ours if token not in wanted), None)
    return "" if extra is None else f"its tokenizer has the token {extra!r}, which the policy's has not"
