"""Random layouts of a model folder: division into files, types, tied and quantised weights, and other files."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.support.model_folders.models import build_config, build_tokenizer

from rlhf_common.model_files.model_folder_check import EMBEDDING, HEAD
from rlhf_common.model_files.weight_files import INDEX, SINGLE
from rlhf_workers.weights.expert_files import as_in_files

TYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
STALE: Final = ("none", SINGLE, "model-00009-of-00009.safetensors", "consolidated.safetensors", "pytorch_model.bin")
DAMAGE: Final = ("none", "no metadata", "missing file", "missing tensor", "twice", "outside", "truncated")
QUANTISED: Final = ("none", "config alone", "fp8", "gptq", "codes without config", "nested config")


@dataclass(frozen=True)
class FolderLayout:
    """One way to store a tiny model."""

    family: str
    tied: bool
    names_tie: bool
    """Whether config.json says whether embedding and head are tied."""
    head: str
    """Head in the files: none, equal (to the embedding), or other."""
    files: int
    """Number of weight files; 0: one without an index."""
    types: tuple[torch.dtype, ...]
    """Types of tensors, in turn."""
    packed: bool = False
    """Whether experts are stored as transformers' stacked parameters, rather than one by one."""
    stale: str = "none"
    damage: str = "none"
    quantised: str = "none"

    def write(self, folder: Path) -> Path:
        """Write the folder and return it."""
        folder.mkdir(parents=True, exist_ok=True)
        config = build_config(self.family, tie_word_embeddings=self.tied).to_dict() | {"architectures": None}
        if not self.names_tie:
            config.pop("tie_word_embeddings")
        tensors = self._tensors()
        self._quantise(config, tensors)
        (folder / "config.json").write_text(json.dumps(config))
        build_tokenizer().save_pretrained(folder)
        self._write_weights(folder, tensors)
        if self.stale != "none":
            save_file({name: torch.zeros_like(value) for name, value in tensors.items()}, folder / self.stale)
        return folder

    def _tensors(self) -> dict[str, torch.Tensor]:
        import transformers

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model = transformers.AutoModelForCausalLM.from_config(
                build_config(self.family, tie_word_embeddings=False), dtype=torch.float32
            )
        named = {name: value.detach() for name, value in model.named_parameters()}
        apart = (part for each in named.items() for part in as_in_files(*each, self.family))
        tensors = named if self.packed else dict(apart)
        for number, (name, value) in enumerate(sorted(tensors.items())):
            tensors[name] = value.to(self.types[number % len(self.types)])
        if self.head == "equal":
            tensors[HEAD] = tensors[EMBEDDING].clone()
        elif self.head == "none":
            del tensors[HEAD]
        return tensors

    def _quantise(self, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.1.self_attn.q_proj"
        if self.quantised in ("config alone", "fp8", "gptq"):
            config["quantization_config"] = {"quant_method": "gptq" if self.quantised == "gptq" else "fp8"}
        elif self.quantised == "nested config":
            config["text_config"] = {"quantization_config": {"quant_method": "fp8"}}
        if self.quantised in ("fp8", "codes without config"):
            tensors[f"{name}.weight"] = tensors[f"{name}.weight"].to(torch.float8_e4m3fn)
            tensors[f"{name}.weight_scale_inv"] = torch.ones(1, 1)
        elif self.quantised == "gptq":
            tensors[f"{name}.qweight"] = torch.ones(4, 4, dtype=torch.int32)

    def _write_weights(self, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        names = [SINGLE] if not self.files else [f"model-{n:05d}-of-{self.files:05d}.safetensors" for n in
                                                 range(1, self.files + 1)]  # fmt: skip
        places = {name: names[number % len(names)] for number, name in enumerate(sorted(tensors))}
        for file in names:
            stored = {name: value for name, value in tensors.items() if places[name] == file}
            if self.damage == "twice":
                stored["model.norm.weight"] = tensors["model.norm.weight"] + names.index(file)
            save_file(stored, folder / file, metadata={"format": "pt"})
        if self.damage == "missing tensor":
            places["model.layers.7.mlp.up_proj.weight"] = names[0]
        elif self.damage == "outside":
            places["model.norm.weight"] = f"../{names[0]}"
        elif self.damage == "missing file":
            (folder / names[-1]).unlink()
        elif self.damage == "truncated":
            (folder / names[0]).write_bytes((folder / names[0]).read_bytes()[:-5])
        if self.files:
            metadata = {} if self.damage == "no metadata" else {"metadata": {"total_size": 1}}
            (folder / INDEX).write_text(json.dumps({**metadata, "weight_map": places}))


def layouts() -> st.SearchStrategy[FolderLayout]:
    """Return layouts, most of which have one unusual property."""
    sound = {
        "family": st.sampled_from(("llama", "qwen2", "gemma2", "mixtral")),
        "tied": st.booleans(),
        "names_tie": st.booleans(),
        "head": st.sampled_from(("none", "equal", "other")),
        "files": st.integers(0, 3),
        "packed": st.booleans(),
        "types": st.lists(st.sampled_from(TYPES), min_size=1, max_size=3).map(tuple),
    }
    odd: list[dict[str, tuple[str, ...]]] = [{}, {"stale": STALE}, {"damage": DAMAGE}, {"quantised": QUANTISED}]
    return st.one_of(
        [
            st.builds(FolderLayout, **sound, **{key: st.sampled_from(choices) for key, choices in each.items()})
            for each in odd
        ]
    )
