"""Tokens a second of the torch engine against transformers.generate, on one small random model and one set of prompts.

    python benchmarks/generation.py --json

No token ends a response. With --lengths equal all responses are as long, and both sides decode the same tokens; with
varied they are between a quarter of it and all of it, and transformers decodes each batch up to its longest while only
the tokens asked for count. transformers gets the prompts in left-padded batches of the same size. Its best case is
equal. The last line of --json is one object.
"""

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from rlhf_api.samples import SampleKey, SampleRequest
from rlhf_workers.devices.device import device_name
from rlhf_workers.generation.engine import EngineLimits, SamplingParameters
from rlhf_workers.generation.torch_engine.engine import TorchEngine

VOCABULARY = 64


@dataclass(frozen=True)
class Figure:
    """One measurement: the best of the repeats."""

    what: str
    batch_size: int
    tokens_per_second: float
    tokens_per_cpu_second: float
    """What stays steady on a machine that others use too."""


class NoText:
    """The benchmark never looks at text, and no token ends a response."""

    eos_token_id = None


def build_model(arguments: argparse.Namespace, attention: str, device: torch.device) -> Any:
    """A random Llama; through a folder, as a job would load it."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.hidden * 8 // 3 // 32 * 32,
        num_hidden_layers=arguments.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.1,
        pad_token_id=0,
        eos_token_id=None,
    )
    with tempfile.TemporaryDirectory() as folder:
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(Path(folder))
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)
    return model.to(device).eval()


def build_requests(arguments: argparse.Namespace) -> list[SampleRequest]:
    random = np.random.default_rng(0)
    shortest = arguments.response if arguments.lengths == "equal" else arguments.response // 4
    return [
        SampleRequest(
            SampleKey(0, index, 0),
            random.integers(1, VOCABULARY, random.integers(arguments.prompt // 2, arguments.prompt + 1)).astype(
                np.int32
            ),
            index,
            int(random.integers(shortest, arguments.response + 1)),
        )
        for index in range(arguments.samples)
    ]


def run_engine(engine: TorchEngine, requests: list[SampleRequest]) -> None:
    """Decodes them all."""
    engine.submit(requests)
    while engine.held:
        engine.step()


def run_transformers(model: Any, requests: list[SampleRequest], batch_size: int) -> None:
    """The same with transformers.generate, batch after batch."""
    for first in range(0, len(requests), batch_size):
        prompts = [request.prompt for request in requests[first : first + batch_size]]
        longest = max(len(prompt) for prompt in prompts)
        ids = np.zeros((len(prompts), longest), np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = prompt
        whole = torch.from_numpy(ids).to(model.device)
        with torch.inference_mode():
            model.generate(
                whole,
                attention_mask=(whole != 0).long(),
                do_sample=True,
                top_k=0,
                max_new_tokens=max(request.max_response_tokens for request in requests[first : first + batch_size]),
            )


def fastest(batch_size: int, tokens: int, candidates: dict[str, Callable[[], None]], repeats: int) -> list[Figure]:
    """Runs each candidate, which decodes `tokens`, once to warm up, then all in turn `repeats` times: whatever else the
    machine does hits them alike."""
    for work in candidates.values():
        work()
    wall: dict[str, list[float]] = {what: [] for what in candidates}
    cpu: dict[str, list[float]] = {what: [] for what in candidates}
    for _ in range(repeats):
        for what, work in candidates.items():
            wall_started, cpu_started = time.perf_counter(), time.process_time()
            work()
            wall[what].append(time.perf_counter() - wall_started)
            cpu[what].append(time.process_time() - cpu_started)
    return [
        Figure(what, batch_size, round(tokens / min(wall[what]), 1), round(tokens / min(cpu[what]), 1))
        for what in candidates
    ]


def measure(arguments: argparse.Namespace) -> list[Figure]:
    device = torch.device(arguments.device)
    fused, written_out = (build_model(arguments, attention, device) for attention in ("sdpa", "eager"))
    requests = build_requests(arguments)
    tokens = sum(request.max_response_tokens for request in requests)
    figures = []
    for size in arguments.batch_sizes:
        limits = EngineLimits(size, arguments.prompt, arguments.response)
        fast = TorchEngine(fused, NoText(), SamplingParameters(), limits, deterministic=False)
        exact = TorchEngine(written_out, NoText(), SamplingParameters(), limits, deterministic=True)
        candidates: dict[str, Callable[[], None]] = {
            "engine": partial(run_engine, fast, requests),
            "engine deterministic": partial(run_engine, exact, requests),
            "transformers.generate": partial(run_transformers, fused, requests, size),
        }
        figures += fastest(size, tokens, candidates, arguments.repeats)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one object as the last line")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=16, help="longest prompt; the shortest has half as many tokens")
    parser.add_argument("--response", type=int, default=32)
    parser.add_argument("--lengths", choices=("equal", "varied"), default="equal")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[8, 32, 64, 128])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.utils.logging.set_verbosity_error()
    figures = measure(arguments)
    for figure in figures:
        print(
            f"{figure.what:24} batch {figure.batch_size:4}  {figure.tokens_per_second:8.0f} tokens/s"
            f"  {figure.tokens_per_cpu_second:8.0f} tokens a CPU second"
        )
    if arguments.json:
        names = ("threads", "hidden", "layers", "prompt", "response", "lengths", "samples", "repeats")
        machine = {"device": device_name(torch.device(arguments.device)), "machine": platform.machine()}
        setting = machine | {name: getattr(arguments, name) for name in names}
        print(json.dumps(setting | {"figures": [asdict(figure) for figure in figures]}))


if __name__ == "__main__":
    main()
