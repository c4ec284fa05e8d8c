"""Merges adapters into whole weights on the worker that uses them, from the folder's weights and A and B.

Rule: training ranks merge with the same function. Every adapted matrix has both factors with matching shapes, or
WorkError.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

import torch

from rlhf_api.algorithms import ModelKind, ModelRole, graph_of
from rlhf_api.job import RLHFJobSpec
from rlhf_api.job.lora import Lora
from rlhf_api.peft_folder_check import A_SUFFIX, B_SUFFIX, PREFIX
from rlhf_common import control_pb2 as pb
from rlhf_common.names import ADAPTER_FIELD, ADAPTER_WEIGHTS, ExitCode
from rlhf_workers.failures import WorkError
from rlhf_workers.models.loading import model_folder
from rlhf_workers.models.lora_linear import merged
from rlhf_workers.models.precision import compute_dtype
from rlhf_workers.weights import peft_folder
from rlhf_workers.weights.fetching import FetchedWeights
from rlhf_workers.weights.folder import read_file, read_folder

BACKBONE: Final = "model."
"""Prefix of a model's layers, embeddings and norms."""
LM_HEAD: Final = "lm_head."
MADE_ANEW: Final = ".rotary_emb.inv_freq"
"""Suffix of buffers in a folder that are left out."""


class WeightFetcher(Protocol):
    """`fetch_weights`: all tensors of a model version, or WorkError."""

    def __call__(
        self, model: str, version: int, sources: Sequence[pb.WeightLocation], certificates: Path | None
    ) -> AbstractContextManager[FetchedWeights]: ...


def starts_elsewhere(spec: RLHFJobSpec) -> bool:
    """Return whether version 0 of the policy includes an adapter beside its folder."""
    lora = spec.training.lora
    return lora is not None and lora.adapter is not None


class AdapterWeights:
    """Implements `WeightFetcher` on top of another one: merges adapters into whole weights."""

    def __init__(self, spec: RLHFJobSpec, weight_fetcher: WeightFetcher) -> None:
        self._spec, self._open = spec, weight_fetcher

    @contextmanager
    def __call__(
        self, model: str, version: int, sources: Sequence[pb.WeightLocation], certificates: Path | None
    ) -> Iterator[FetchedWeights]:
        """See WeightFetcher."""
        with self._open(model, version, sources, certificates) as came:
            role = next((role for role in graph_of(self._spec).trained if role == model), None)
            settings = None if role is None else self._spec.training.adapters(role)
            if role is None or settings is None:
                yield came
            elif not any(location.address for location in sources):
                yield self._begun(role, settings, came)
            elif settings.publish == "Adapters" and not self._adds_itself(role, settings):
                yield replace(came, tensors=self._whole(role, settings, version, came.tensors))
            else:
                yield came

    def _adds_itself(self, role: ModelRole, settings: Lora) -> bool:
        """Return whether the model takes its adapters unmerged, as a critic on a shared trunk does."""
        return settings.trunk == "Shared" and role.kind is ModelKind.VALUE

    def _begun(self, role: ModelRole, settings: Lora, folder: FetchedWeights) -> FetchedWeights:
        """Return version 0: the folder, with the job's initial adapter merged into the policy if there is one."""
        if settings.adapter is None or role is not graph_of(self._spec).policy:
            return folder
        adapter_folder = model_folder(settings.adapter, ADAPTER_FIELD)
        peft_folder.check(adapter_folder, settings, ADAPTER_FIELD, self._spec.models.actor.path)
        tensors = read_file(ADAPTER_FIELD, adapter_folder, adapter_folder / ADAPTER_WEIGHTS)
        named = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
        return replace(folder, tensors=self._merge(role, settings, 0, folder.tensors, named))

    def _whole(
        self, role: ModelRole, settings: Lora, version: int, came: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        source = self._spec.models.source(role)
        assert source is not None  # a trained role has a model
        field = self._spec.models.path_field(role)
        base = read_folder(field, model_folder(source.path, field))
        return self._merge(role, settings, version, base, came)

    def _merge(
        self,
        role: ModelRole,
        settings: Lora,
        version: int,
        base: Mapping[str, torch.Tensor],
        came: Mapping[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """Merge the adapters in `came` into `base`; other tensors of `came` replace those of `base`.

        Return the model's tensors.
        """
        prefixes = (BACKBONE, LM_HEAD) if role.kind is ModelKind.POLICY else (BACKBONE,)
        whole = {
            name: value for name, value in base.items() if name.startswith(prefixes) and not name.endswith(MADE_ANEW)
        }
        whole |= {name: value for name, value in came.items() if not name.endswith((A_SUFFIX, B_SUFFIX))}
        compute, subject = compute_dtype(self._spec), f"{role} version {version}"
        modules = {
            name.removesuffix(suffix) for suffix in (A_SUFFIX, B_SUFFIX) for name in came if name.endswith(suffix)
        }
        targets = frozenset(settings.target_modules)
        wanted = {
            module for name in whole if (module := name.removesuffix(".weight")).rpartition(".")[2] in targets
            and name.endswith(".weight")
        }  # fmt: skip
        if modules != wanted:
            odd = sorted(modules ^ wanted)
            raise _mismatch(
                f"{subject}: {odd[0]} has {'an adapter' if odd[0] in modules else 'none'}, and {len(odd)} such"
            )
        for module in sorted(modules):
            name, (a, b) = f"{module}.weight", _factors(module, came, subject)
            weight = whole[name]
            if (b.shape[0], a.shape[1]) != tuple(weight.shape) or not a.shape[0] == b.shape[1] == settings.rank:
                shapes = f"{list(b.shape)} x {list(a.shape)}"
                raise _mismatch(f"{subject}: the adapter of {name} has shape {shapes}, the matrix {list(weight.shape)}")
            whole[name] = merged(weight.to(a.device, compute), a.float(), b.float(), settings.scale).to(compute)
        return whole


def _factors(module: str, came: Mapping[str, torch.Tensor], subject: str) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        return came[f"{module}{A_SUFFIX}"], came[f"{module}{B_SUFFIX}"]
    except KeyError as error:
        raise _mismatch(f"{subject}: {error.args[0]} is missing") from None


def _mismatch(message: str) -> WorkError:
    return WorkError("WeightsMismatch", message, exit_code=ExitCode.BAD_MODEL)
