"""Losses over pairs of a better and a worse response, as differentiable functions of values per pair [p].

Sources: DPO arXiv 2305.18290 (label smoothing: the conservative form of its authors), IPO arXiv 2310.12036, rewards of
pairs and their centering arXiv 2204.05862 and 2312.09244.
"""

import torch
from torch.nn.functional import logsigmoid


def dpo_loss(difference: torch.Tensor, beta: float, label_smoothing: float = 0.0) -> torch.Tensor:
    """Return -(1 - e) log s(beta d) - e log s(-beta d) of each pair, e the `label_smoothing`.

    `difference` d: log p(chosen) - log p(rejected) of the policy, minus the same of the reference.
    """
    scaled = beta * difference
    loss: torch.Tensor = -(1 - label_smoothing) * logsigmoid(scaled)
    return loss - label_smoothing * logsigmoid(-scaled) if label_smoothing else loss


def ipo_loss(difference: torch.Tensor, beta: float) -> torch.Tensor:
    """Return (d - 1 / (2 beta))^2 of each pair, d as in `dpo_loss`."""
    return (difference - 1 / (2 * beta)).square()


def ranking_loss(
    chosen: torch.Tensor, rejected: torch.Tensor, margin: float = 0.0, centering: float = 0.0
) -> torch.Tensor:
    """Return -log s(chosen - rejected - margin) + centering (chosen + rejected)^2 of each pair's scores, s the logistic
    function."""
    loss: torch.Tensor = -logsigmoid(chosen - rejected - margin)
    return loss + centering * (chosen + rejected).square() if centering else loss
