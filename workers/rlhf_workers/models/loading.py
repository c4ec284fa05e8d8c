"""Loading Hugging Face folders: policy, value model, reward model, tokenizer; and replacing a loaded model's weights.

Rule: a model is loaded whole or not at all; only a value head may be absent. An unusable folder is a WorkError that
names the manifest field, the path and the problem. Must never run code from a folder, and never read pickled weights.
"""

import copy
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import torch
import transformers
from safetensors import safe_open
from torch import nn

from rlhf_api.job.lora import Lora
from rlhf_api.peft_folder_check import A_SUFFIX, B_SUFFIX
from rlhf_common.json_document import parse_json
from rlhf_common.model_files.companion_files import TEXT
from rlhf_common.model_files.model_folder_check import check_model_folder, read_model_config, refuse_adapters
from rlhf_common.model_files.weight_files import FolderError, read_weight_files
from rlhf_common.names import ExitCode
from rlhf_workers.failures import WorkError
from rlhf_workers.models.experts import FAMILIES, TILED
from rlhf_workers.models.lora_linear import adapt
from rlhf_workers.progress import stage

log = logging.getLogger(__name__)

Attention = Literal["eager", "sdpa"]
"""eager is explicit attention, and the experts of FAMILIES in tiles (for reproducible results); sdpa is the fused
kernel.
"""

SCORE_HEAD: Final = "score.weight"
"""Name of the head's weight in a decoder with a sequence classification head."""
HUB_ID: Final = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
HUB_FILES: Final = ("*.safetensors", *(f"*{suffix}" for suffix in sorted(TEXT)), "LICENSE*", "NOTICE*")
"""Files to download of a model: weights, configuration, tokenizer, templates, code and documents."""
NOT_FROM_HUB: Final = ("*/*.safetensors", "consolidated*")
"""Files not to download: weights in other formats beside the model's own."""
ALIGNMENT: Final = 64
"""Bytes of a cache line. Weights mapped from a file may start at any address, where kernels may sum in another
order."""
NAMED: Final = 4
"""Tensors that an error message names before it counts the rest."""

transformers.utils.logging.disable_progress_bar()


class ValueModel(nn.Module):
    """A causal language model's backbone with a scalar head; the backbone's parameter names equal those of the folder.

    The head is `value_head` (Linear hidden -> 1, no bias).
    """

    def __init__(self, backbone: transformers.PreTrainedModel, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self.config = backbone.config
        self.add_module(prefix, backbone)
        text = backbone.config.get_text_config()
        self.value_head = nn.Linear(text.hidden_size, 1, bias=False, dtype=backbone.dtype, device=backbone.device)
        nn.init.zeros_(self.value_head.weight)
        self.apart: frozenset[str] = frozenset()
        """Names of parameters that belong to another model and are never replaced."""

    @property
    def backbone(self) -> transformers.PreTrainedModel:
        """Embeddings, layers and final norm."""
        backbone: transformers.PreTrainedModel = self.get_submodule(self.prefix)
        return backbone

    def forward(self, input_ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """Return values [batch, tokens] float32 for [batch, tokens] ids: V of the state after each token."""
        hidden = self.backbone(input_ids=input_ids, use_cache=False, **arguments).last_hidden_state
        values: torch.Tensor = self.value_head(hidden)
        return values.squeeze(-1).float()


def model_folder(path: str, field: str) -> Path:
    """Return the local folder of a model: `path` itself, or the snapshot of a hub id, which is downloaded if needed.

    Raises WorkError ModelMissing if there is neither.
    """
    folder = Path(path)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise _missing(field, path, "it is a file; a Hugging Face folder with config.json and safetensors is needed")
    if not HUB_ID.match(path):
        raise _missing(field, path, "there is no such folder")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(path, allow_patterns=list(HUB_FILES), ignore_patterns=list(NOT_FROM_HUB)))
    except Exception as error:
        raise _missing(
            field, path, f"it is neither a folder here nor a hub id that can be fetched: {_first_line(error)}"
        ) from error


def load_causal_lm(
    path: str, *, field: str, dtype: torch.dtype, device: torch.device, attention: Attention
) -> transformers.PreTrainedModel:
    """Return a causal language model in eval mode on `device`; `attention` falls back to eager if sdpa does not support
    the model."""
    folder = checked_folder(path, field)
    return _load(transformers.AutoModelForCausalLM, folder, path, field, dtype, device, attention)


def load_backbone_with_value_head(
    path: str, *, field: str, dtype: torch.dtype, device: torch.device, attention: Attention
) -> ValueModel:
    """Return a value model: the backbone of a causal language model, and `value_head.weight`.

    Without a value head in the folder, use the head of a reward model (`score.weight`), or else zeros.
    """
    folder = checked_folder(path, field, head=False)
    backbone = _load(
        transformers.AutoModel, folder, path, field, dtype, device, attention, ignore=("lm_head.", SCORE_HEAD)
    )
    return _with_value_head(backbone, folder, path, field)


def _with_value_head(backbone: transformers.PreTrainedModel, folder: Path, path: str, field: str) -> ValueModel:
    model = ValueModel(backbone, backbone.base_model_prefix or "model")
    for name in ("value_head.weight", SCORE_HEAD):
        if (head := _find_tensor(folder, name)) is not None:
            if head.shape != model.value_head.weight.shape:
                wanted, result = list(model.value_head.weight.shape), list(head.shape)
                raise _corrupt(field, path, f"{name} has shape {result}, the model needs {wanted}")
            with torch.no_grad():
                model.value_head.weight.copy_(head)
            break
    model.eval().requires_grad_(False)
    return model


def value_model_over(trunk: transformers.PreTrainedModel, settings: Lora, path: str, *, field: str) -> ValueModel:
    """Return a value model over the backbone of a loaded causal language model, with adapters that change nothing yet,
    and a value head as in `load_backbone_with_value_head`.
    """
    shared = {id(part): part for part in (*trunk.base_model.parameters(), *trunk.base_model.buffers())}
    backbone = copy.deepcopy(trunk.base_model, memo=dict(shared))
    adapt(backbone, settings)
    model = _with_value_head(backbone, checked_folder(path, field, head=False), path, field)
    model.apart = frozenset(name for name, part in model.named_parameters() if id(part) in shared)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((A_SUFFIX, B_SUFFIX)):
                parameter.data = torch.zeros_like(parameter, dtype=trunk.dtype)
    model.eval().requires_grad_(False)
    return model


def load_sequence_classifier(
    path: str, *, field: str, dtype: torch.dtype, device: torch.device, attention: Attention
) -> transformers.PreTrainedModel:
    """Return a reward model: sequence classification with exactly one output."""
    folder = checked_folder(path, field, head=False)
    model = _load(transformers.AutoModelForSequenceClassification, folder, path, field, dtype, device, attention)
    if model.config.num_labels != 1:
        raise WorkError(
            "ModelUnsupported",
            f"{field}: {path} has {model.config.num_labels} outputs (num_labels in config.json); a reward model has 1",
            field=field,
            exit_code=ExitCode.BAD_MODEL,
        )
    return model


def load_tokenizer(path: str, field: str) -> transformers.PreTrainedTokenizerBase:
    """Return the tokenizer in a model folder."""
    folder = model_folder(path, field)
    _read_json(folder / "config.json", path, field)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")):
        raise _missing(field, path, "it holds no tokenizer (tokenizer.json)")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise _corrupt(field, path, f"its tokenizer does not load: {_first_line(error)}") from error
    return tokenizer


def generation_config(folder: Path) -> transformers.GenerationConfig:
    """Return the generation defaults of a folder: its generation_config.json, or those derived from its config.json."""
    try:
        return transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return transformers.GenerationConfig.from_model_config(config)


def replace_weights(model: nn.Module, tensors: Mapping[str, torch.Tensor], *, subject: str) -> int:
    """Copy a complete set of named weights into `model`; return the bytes copied.

    Raises WorkError before the first copy if the set does not match. An error of a copy leaves the model torn.
    """
    return copy_weights(matched_weights(model, tensors, subject=subject))


def copy_weights(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> int:
    """Copy the tensors that `matched_weights` returned; return the bytes copied."""
    with torch.no_grad():
        for target, source in copies:
            target.copy_(source)
    return sum(source.numel() * source.element_size() for _, source in copies)


def matched_weights(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], *, subject: str
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (tensor of the model, new tensor) for a complete set of named weights.

    For tied weights one name is enough; two must be equal. `subject` (such as "actor version 7") starts the error
    message. Raises WorkError WeightsMismatch.
    """
    targets: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for name in getattr(model, "apart", ()):
        del targets[name]
    targets |= {name: buffer for name, buffer in model.named_buffers() if name in tensors}
    by_storage: dict[int, list[str]] = {}
    for name, target in targets.items():
        by_storage.setdefault(id(target), []).append(name)
    wrong = [f"{name} is not a parameter of the model" for name in tensors if name not in targets]
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for names in by_storage.values():
        present = [name for name in names if name in tensors]
        target = targets[names[0]]
        if not present:
            wrong.append(f"{names[0]} is missing")
            continue
        for name in present:
            if tensors[name].shape != target.shape:
                wrong.append(f"{name} has shape {list(tensors[name].shape)}, the model needs {list(target.shape)}")
            elif name != present[0] and not torch.equal(tensors[name], tensors[present[0]]):
                wrong.append(f"{name} differs from {present[0]}, to which the model ties it")
        copies.append((target, tensors[present[0]]))
    if wrong:
        raise WorkError("WeightsMismatch", f"{subject}: {_some(wrong)}", exit_code=ExitCode.BAD_MODEL)
    return copies


def _load(
    kind: Any,
    folder: Path,
    path: str,
    field: str,
    dtype: torch.dtype,
    device: torch.device,
    attention: Attention,
    ignore: Iterable[str] = (),
) -> transformers.PreTrainedModel:
    """Load one model class from a checked folder; the loader's own report of missing and misshapen tensors decides."""
    arguments: dict[str, Any] = {
        "dtype": dtype,
        "local_files_only": True,
        "trust_remote_code": False,
        "use_safetensors": True,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # reported below with the field, instead of raised
    }
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()  # its load report becomes an error or warning below
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None:
            attention = "eager"  # fused attention has no soft cap
        if attention == "eager" and config.model_type in FAMILIES:
            arguments["experts_implementation"] = TILED
        with stage(f"loading {field} from its folder"):
            try:
                model, info = kind.from_pretrained(folder, attn_implementation=attention, **arguments)
            except ValueError as error:
                if attention == "eager" or "scaled_dot_product_attention" not in str(error):
                    raise
                model, info = kind.from_pretrained(folder, attn_implementation="eager", **arguments)
    except Exception as error:
        raise _corrupt(field, path, _first_line(error)) from error
    finally:
        transformers.utils.logging.set_verbosity(verbosity)
    wrong = [f"{name} is missing" for name in sorted(info["missing_keys"])]
    wrong += [
        f"{name} has shape {list(found)}, config.json needs {list(wanted)}"
        for name, found, wanted in sorted(info["mismatched_keys"])
    ]
    wrong += [str(message) for message in info.get("error_msgs", ())]
    if wrong:
        raise _corrupt(field, path, _some(wrong))
    for name in sorted(info["unexpected_keys"]):
        if name != "value_head.weight" and not name.startswith(tuple(ignore) or ("\0",)):
            log.warning("%s: %s holds %s, which the model does not have; it is ignored", field, path, name)
    loaded: transformers.PreTrainedModel = model.to(device).eval().requires_grad_(False)
    _align(loaded)
    return loaded


def _align(model: nn.Module) -> None:
    """Move a CPU's parameters that start off a cache line into new memory; ties are preserved."""
    for parameter in model.parameters():
        if parameter.device.type == "cpu" and parameter.data_ptr() % ALIGNMENT:
            parameter.data = parameter.data.clone()


def checked_folder(path: str, field: str, *, head: bool = True) -> Path:
    """Return the folder of a model that passes `check_model_folder`, with a language model's head if `head`."""
    folder = model_folder(path, field)
    try:
        check_model_folder(folder, head=head)
    except FolderError as error:
        raise folder_failure(field, path, error) from error
    return folder


def readable_folder(path: str, field: str) -> Path:
    """Return the folder of a model, which may be quantised, for vLLM's own loader; check its headers before."""
    folder = model_folder(path, field)
    try:
        refuse_adapters(folder)
        read_model_config(folder)
        read_weight_files(folder)
    except FolderError as error:
        raise folder_failure(field, path, error) from error
    return folder


def folder_failure(field: str, path: str | Path, error: FolderError) -> WorkError:
    """Return the failure for an unusable folder, with the field and the path."""
    return WorkError(error.reason, f"{field}: {path}: {error}", field=field, exit_code=ExitCode.BAD_MODEL)


def _find_tensor(folder: Path, name: str) -> torch.Tensor | None:
    """Return one tensor of a checked folder by its name; None if no file has it."""
    entry = read_weight_files(folder).tensors.get(name)
    if entry is None:
        return None
    with safe_open(entry.file, framework="pt") as opened:
        tensor: torch.Tensor = opened.get_tensor(name)
    return tensor


def _read_json(file: Path, path: str, field: str) -> Any:
    try:
        return parse_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _missing(field, path, f"it holds no {file.name}") from None
    except (OSError, ValueError) as error:
        raise _corrupt(field, path, f"{file.name} is not JSON: {_first_line(error)}") from error


def _missing(field: str, path: str, why: str) -> WorkError:
    return WorkError("ModelMissing", f"{field}: {path}: {why}", field=field, exit_code=ExitCode.BAD_MODEL)


def _corrupt(field: str, path: str, why: str) -> WorkError:
    return WorkError("ModelCorrupt", f"{field}: {path}: {why}", field=field, exit_code=ExitCode.BAD_MODEL)


def _some(wrong: list[str]) -> str:
    more = len(wrong) - NAMED
    return "; ".join(wrong[:NAMED]) + (f"; and {more} more" if more > 0 else "")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return " ".join(line.strip() for line in lines[:2]) if lines else type(error).__name__
