"""The reported balance of expert load equals the count from a hook of transformers' own model, in every layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.support.model_folders import models
from tests.support.training.training_ranks import make_batch, make_job, run

EXPERTS = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every token takes one of so many experts that some are unused, in two of three layers."""
    root = tmp_path_factory.mktemp("models")
    sizes = {"num_experts": EXPERTS, "num_experts_per_tok": 1}
    return models.write_policy(root / "moe", "qwen3_moe", seed=1, num_hidden_layers=3, **sizes)


def expected(folder: Path) -> tuple[float, float]:
    """Return the expected values from the iteration's samples, one by one."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    used: dict[str, torch.Tensor] = {}

    def watch(name: str) -> Any:
        def hook(module: Any, inputs: tuple[torch.Tensor, ...], result: Any) -> None:
            logits = torch.nn.functional.linear(inputs[0].flatten(0, -2), module.weight)
            chosen = torch.bincount(logits.argmax(dim=-1), minlength=EXPERTS)
            used[name] = used.get(name, torch.zeros(EXPERTS, dtype=torch.int64)) + chosen

        return hook

    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(watch(name))
    batch = make_batch(seed=0)
    for row, prompt in enumerate(batch.prompts):
        with torch.no_grad():
            model(torch.cat([prompt, batch.responses[row, : batch.response_lengths[row]]])[None])
    assert len(used) > 1, "several layers have experts"
    load = max(float(rows.max() / rows.double().mean()) for rows in used.values())
    return load, max(float((rows == 0).double().mean()) for rows in used.values())


@pytest.mark.full(quick=1)
@pytest.mark.parametrize(
    ("pipeline", "data", "training"),
    [
        (1, 1, {}),
        (2, 1, {"activationCheckpointing": True}),
        (1, 2, {"parallelism": {"data": 2, "expert": 2}}),
        (2, 2, {"packing": True}),
        (1, 1, {"backend": "megatron"}),
        (1, 2, {"backend": "megatron", "parallelism": {"data": 2, "expert": 2}}),
    ],
)
def test_every_layout_says_what_the_whole_model_used(
    pipeline: int, data: int, training: dict[str, Any], folder: Path
) -> None:
    job = make_job(folder, folder, training={"microBatchSize": 1, **training})
    _, metrics, _ = run(job, range(1), pipeline, data)
    load, unused = expected(folder)
    assert load > 1.5
    assert unused > 0
    for model in ("actor", "critic"):  # of one folder
        assert metrics[0][f"train/expert_load/{model}"] == pytest.approx(load)
        assert metrics[0][f"train/experts_unused/{model}"] == pytest.approx(unused)


def test_models_without_experts_say_nothing_and_each_iteration_is_counted_anew(folder: Path, tmp_path: Path) -> None:
    dense = models.write_policy(tmp_path / "dense", "llama", seed=1)
    _, metrics, _ = run(make_job(folder, dense, training={"microBatchSize": 1}), range(2), 1)
    named = [sorted(name for name in values if "expert" in name) for values in metrics]
    assert named == [["train/expert_load/actor", "train/experts_unused/actor"]] * 2
    _, first, _ = run(make_job(folder, folder, training={"microBatchSize": 1}), range(1), 1)
    assert metrics[0]["train/expert_load/actor"] == first[0]["train/expert_load/actor"]
    assert metrics[1]["train/expert_load/actor"] <= EXPERTS
