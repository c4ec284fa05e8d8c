"""Compares a training step with and without shared prompts: CPU seconds, counted operations, gradients.

    python -m benchmarks.shared_prompts [--prompt 4096] [--response 512] [--group 16] [--rounds 2] [--json]

Builds a random Llama and one group of random responses to one prompt, and trains it with GRPO in packed rows of at most
prompt + group x response tokens: `shared` with `training.sharedPrompts: Enabled`, `whole` with Disabled. Both trainers
exist in one process. A first step of each counts operations (`flops`, forward and backward, by
torch.utils.flop_counter); attention with the kernel's causal mask counts half. It also warms up. Every round then times
both, in alternating order, so a slow moment of the machine affects both. `seconds` is the median CPU time of a step
on one thread. `flops_ratio` and `seconds_ratio` say how many times more `whole` takes, the latter as the median of
the rounds' ratios. `formula_ratio` is what `Auto` compares with its bound. `gradients` is the largest difference
between both gradients, relative to the largest number of a tensor.
"""

import argparse
import json
import logging
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from rlhf_api.algorithms import full_graph
from rlhf_api.algorithms.graph import SAMPLED_FIELD
from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_common.arrays import pack
from rlhf_planner.schedule.methods import placed
from rlhf_planner.schedule.serial import serial_table
from rlhf_planner.training_flops import active_parameters, attention_width, training_flops
from rlhf_planner.transformer_shape import shape_of
from rlhf_workers.training.backends.torch_backend import build_trainer
from rlhf_workers.training.batches.packed_rows import RowSegment
from rlhf_workers.training.batches.training_batch import TrainingBatch, batch_from
from rlhf_workers.training.schedule.step_timing import NoCommunicator
from rlhf_workers.training.trainer import Trainer

VOCABULARY = 512
WAYS = {"whole": "Disabled", "shared": "Enabled"}
ATEN = torch.ops.aten


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("prompt", 4096), ("response", 512), ("group", 16), ("hidden", 256), ("layers", 2), ("rounds", 2), ("seed", 0),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    if options.group < 2:
        parser.error(f"--group {options.group} must be at least 2, to share a prompt")
    return options


def write_model(folder: Path, options: argparse.Namespace) -> Path:
    """Write a random Llama with heads of 64."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=options.hidden // 64,
        max_position_embeddings=options.prompt + options.response,
    )
    torch.manual_seed(options.seed)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def trainer_of(folder: Path, options: argparse.Namespace, mode: str) -> Trainer:
    """Return the only rank of a job whose step hardly changes the weights."""
    training = {
        "microBatchSize": options.group,
        "microBatchTokens": options.prompt + options.group * options.response,
        "packing": True,
        "sharedPrompts": mode,
        "optimizer": {"learningRate": 1e-11},
    }
    spec = {
        "algorithm": {"grpo": {"miniBatchSize": options.group, "groupSize": options.group}},
        "models": {"actor": {"path": str(folder)}, "reward": {"function": {"module": "none"}}},
        "prompts": {"path": "none"},
        "rollout": {
            "batchSize": options.group,
            "maxPromptTokens": options.prompt,
            "maxResponseTokens": options.response,
        },
        "training": training,
    }
    body = {"apiVersion": "rlhf.dev/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "benchmark"}, "spec": spec}
    table = serial_table(placed({"actor": 1}, 1, 1))
    become = pb.BecomeTraining(rank=0, world_size=1, schedule=table.model_dump_json())
    device = torch.device("cpu")
    return build_trainer(
        RLHFJob.model_validate(body), become, device, lambda _: NoCommunicator(), lambda *_, **__: None
    )  # fmt: skip


def batch_of(options: argparse.Namespace) -> TrainingBatch:
    """Return one group of random responses of one length."""
    rng = np.random.default_rng(options.seed)
    prompt = rng.integers(3, VOCABULARY, options.prompt).astype(np.int32)
    needed = (SAMPLED_FIELD, *full_graph("grpo").scored_fields)
    samples = []
    for number in range(options.group):
        fields = {name: rng.normal(-6, 0.1, 1 if name == "reward" else options.response) for name in needed}
        samples.append(
            pb.TrainSample(
                sample=number,
                prompt=pack(prompt),
                response=pack(rng.integers(3, VOCABULARY, options.response).astype(np.int32)),
                fields={name: pack(value.astype(np.float32)) for name, value in fields.items()},
            )
        )
    return batch_from(samples, len(samples), needed)


def attention_flops(query: Any, key: Any, value: Any, dropout: float = 0.0, causal: bool = False, **_: Any) -> int:
    """Return the operations of the CPU's fused attention."""
    flops: int = sdpa_flop_count(query, key, value)
    return flops // (2 if causal else 1)


def attention_backward_flops(
    slope: Any, query: Any, key: Any, value: Any, out: Any, sums: Any, dropout: float, causal: bool, **_: Any
) -> int:
    """Return the operations of the backward of the CPU's fused attention."""
    flops: int = sdpa_backward_flop_count(slope, query, key, value)
    return flops // (2 if causal else 1)


COUNTED: dict[Any, Any] = {
    ATEN._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
}


def step_seconds(trainer: Trainer, batch: TrainingBatch) -> float:
    """Take a step; return its CPU seconds."""
    begun = time.process_time()
    for _ in trainer.train(0, batch):
        pass
    return time.process_time() - begun


def first_step(trainer: Trainer, batch: TrainingBatch) -> tuple[int, dict[str, torch.Tensor]]:
    """Return the counted operations and the gradients of a step, which changes no weight."""
    (optimizer,) = trainer.optimizers.values()
    optimizer.step = lambda *_: None  # type: ignore[method-assign]
    with FlopCounterMode(display=False, custom_mapping=COUNTED) as counter:
        next(trainer.train(0, batch))
    del optimizer.step
    gradients = {name: optimizer.gradient(name).clone() for name in optimizer.parameters}
    optimizer.gradients.zero_()
    return counter.get_total_flops(), gradients


def formula_ratio(trainer: Trainer, options: argparse.Namespace) -> float:
    """Return the predicted operations without sharing, as a multiple of those with it."""
    shape = shape_of(trainer.stages["actor", 0].config.to_dict())
    whole = RowSegment(options.prompt + options.response)
    shared = RowSegment(options.prompt, (options.response,) * options.group)
    flops = [
        training_flops(active_parameters(shape), attention_width(shape), segment.tokens, segment.pairs)
        for segment in (whole, shared)
    ]
    return float(options.group) * flops[0] / flops[1]


def measured(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the result of the benchmark."""
    batch = batch_of(options)
    trainers = {way: trainer_of(folder, options, mode) for way, mode in WAYS.items()}
    firsts = {way: first_step(trainer, batch) for way, trainer in trainers.items()}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(options.rounds):
        for way in list(WAYS)[:: 1 if number % 2 else -1]:
            seconds[way].append(step_seconds(trainers[way], batch))
            print(f"round {number}: {way} {seconds[way][-1]:.1f} CPU seconds", flush=True)
    (whole_flops, expected), (shared_flops, gradients) = firsts["whole"], firsts["shared"]
    differences = [float((gradients[name] - value).abs().max() / value.abs().max()) for name, value in expected.items()]
    return {
        **{name: getattr(options, name) for name in ("prompt", "response", "group", "hidden", "layers", "rounds")},
        "seconds": {way: statistics.median(times) for way, times in seconds.items()},
        "flops": {"whole": whole_flops, "shared": shared_flops},
        "flops_ratio": whole_flops / shared_flops,
        "seconds_ratio": statistics.median(
            whole / shared for whole, shared in zip(seconds["whole"], seconds["shared"], strict=True)
        ),
        "formula_ratio": formula_ratio(trainers["shared"], options),
        "gradients": max(differences),
    }


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)  # threads that wait for each other would count as CPU time
    logging.disable(logging.WARNING)  # synthetic log-probabilities never match
    with tempfile.TemporaryDirectory() as scratch:
        result = measured(options, write_model(Path(scratch) / "policy", options))
    for name in ("seconds", "flops"):
        whole, shared = result[name]["whole"], result[name]["shared"]
        print(f"{name:8} whole {whole:.4g}  shared {shared:.4g}  ratio {result[f'{name}_ratio']:.2f}")
    print(f"formula  {result['formula_ratio']:.2f}; gradients differ by {result['gradients']:.1e}")
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
