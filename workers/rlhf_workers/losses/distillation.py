"""Cross entropy of a student's logits to a teacher's, with backward, without a whole float32 copy of either.

Float32 arrays of [n, V] are computed in chunks of rows.

Source: knowledge distillation with soft targets (Hinton, Vinyals, Dean, arXiv 1503.02531), on the teacher's own samples
(DistillSpec, arXiv 2310.08461).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from rlhf_workers.losses.log_probabilities import row_chunks


class Distillation(NamedTuple):
    """Comparison of a student's logits with a teacher's, for each of n tokens."""

    cross_entropy: torch.Tensor
    """float32 [n], nats; differentiable in the student's logits."""
    entropy: torch.Tensor
    """float32 [n], nats: entropy of the teacher, the lower bound of the cross entropy."""
    agrees: torch.Tensor
    """bool [n]: whether both have the same most probable token, the first on a tie."""


def distillation(student: torch.Tensor, teacher: torch.Tensor, temperature: float) -> Distillation:
    """Return the cross entropy of softmax(student / temperature) to softmax(teacher / temperature), with statistics for
    reports.

    Both floating [n, V]; temperature 0 (greedy decoding) means 1. Raises ValueError for different shapes.
    """
    if student.shape != teacher.shape:
        raise ValueError(f"logits of a student {list(student.shape)} and a teacher {list(teacher.shape)} differ")
    apply: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = _CrossEntropy.apply
    return Distillation(*apply(student, teacher.detach(), temperature or 1.0))


class _CrossEntropy(torch.autograd.Function):
    """The forward keeps both logits; the backward recomputes the two softmaxes, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, student: torch.Tensor, teacher: torch.Tensor, temperature: float) -> tuple[torch.Tensor, ...]:
        count, device = len(student), student.device
        cross, entropy = (torch.empty(count, dtype=torch.float32, device=device) for _ in range(2))
        agrees = torch.empty(count, dtype=torch.bool, device=device)
        for part in row_chunks(student):
            log_p = torch.log_softmax(teacher[part].float() / temperature, dim=-1)
            log_q = torch.log_softmax(student[part].float() / temperature, dim=-1)
            p = log_p.exp()
            impossible = p == 0  # 0 log 0 = 0, even if the student's logit is minus infinity
            cross[part] = -(p * log_q).masked_fill_(impossible, 0.0).sum(dim=-1)
            entropy[part] = -(p * log_p).masked_fill_(impossible, 0.0).sum(dim=-1)
            agrees[part] = log_p.argmax(dim=-1) == log_q.argmax(dim=-1)
        ctx.save_for_backward(student, teacher)
        ctx.mark_non_differentiable(entropy, agrees)
        ctx.set_materialize_grads(False)
        ctx.temperature = temperature
        return cross, entropy, agrees

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """d CE / d z_j = (q_j - p_j) / T, with z the student's logits."""
        student, teacher = ctx.saved_tensors
        for_cross = gradients[0]
        if for_cross is None:
            return None, None, None
        result = torch.empty_like(student)
        for part in row_chunks(student):
            p = torch.softmax(teacher[part].float() / ctx.temperature, dim=-1)
            q = torch.softmax(student[part].float() / ctx.temperature, dim=-1)
            result[part] = (q - p) * (for_cross[part, None] / ctx.temperature)
        return result, None, None
