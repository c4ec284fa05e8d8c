"""Floating-point operations of training, by tokens and by pairs of attention.

6 per parameter and token (Kaplan et al., arXiv 2001.08361), and 12 per layer, width and pair of a query and a key,
forward and backward. Embedding, head and experts that a token does not choose are left out.
"""

from typing import Final

from rlhf_planner.transformer_shape import TransformerShape

LEAST_SHARING_GAIN: Final = 1.1
"""Operations without shared prompts, as a multiple of those with them, from which `sharedPrompts: Auto` shares."""


def active_parameters(shape: TransformerShape) -> int:
    """Return the parameters of all layers that a token uses."""
    attention = shape.hidden * (2 * shape.queries + 2 * shape.keys)
    dense, experts = 3 * shape.hidden * shape.intermediate, shape.experts
    if experts is None:
        return shape.layers * (attention + dense)
    routed = shape.hidden * (3 * experts.chosen * experts.width + experts.count)
    return shape.layers * attention + len(experts.dense) * dense + (shape.layers - len(experts.dense)) * routed


def attention_width(shape: TransformerShape) -> int:
    """Return the sum of the widths of all query heads of all layers."""
    return shape.layers * shape.queries


def training_flops(parameters: float, width: float, tokens: float, pairs: float, per_parameter: int = 6) -> float:
    """Return the operations of a forward and a backward.

    `parameters` and `width` are of a model or a layer; `pairs` are of a query and a key that it sees. `per_parameter`
    is 4 for frozen ones.
    """
    return per_parameter * parameters * tokens + 12 * width * pairs
