"""A frozen linear map with a low-rank adapter, and the insertion of such maps into a model.

W x becomes W x + s B (A x). Rule: parameters have PEFT's names after its prefix. Must never change a frozen weight.
"""

import torch
from torch import nn

from rlhf_api.job.lora import Lora


class LoraLinear(nn.Module):
    """A frozen linear map with its adapter; `weight` and `bias` keep the names of the original map."""

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        """`base` provides its parameters; A and B are float32, with torch's initial values."""
        super().__init__()
        self.weight, self.bias, self.scale = base.weight, base.bias, scale
        device, kind = base.weight.device, torch.float32
        self.lora_A = nn.Linear(base.in_features, rank, bias=False, device=device, dtype=kind)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False, device=device, dtype=kind)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return [..., out] for [..., in]."""
        added: torch.Tensor = self.lora_B(self.lora_A(inputs))
        return nn.functional.linear(inputs, self.weight, self.bias) + added * self.scale

    @torch.no_grad()
    def merged(self) -> torch.Tensor:
        """Return W + s B A, float32 [out, in]."""
        return merged(self.weight, self.lora_A.weight, self.lora_B.weight, self.scale)


def merged(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Return `weight` [out, in] + `scale` x `b` [out, rank] `a` [rank, in], added in float32."""
    return weight.float() + (b @ a) * scale


def adapt(layers: nn.Module, settings: Lora) -> None:
    """Add an adapter, with torch's initial values, to every linear map in `layers` that the settings name."""
    targets = frozenset(settings.target_modules)
    for parent in list(layers.modules()):
        for name, child in list(parent.named_children()):
            if name in targets and isinstance(child, nn.Linear):
                setattr(parent, name, LoraLinear(child, settings.rank, settings.scale))
