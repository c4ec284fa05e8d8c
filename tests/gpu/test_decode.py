"""The torch engine against transformers and the memory-bandwidth limit, with and without captured passes.

The limit of a step: every weight and every key and value of the batch is read once, at this machine's copy rate.
"""

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import pytest
import torch
import transformers
from tests.gpu.decoding import WAYS, decoded, engine_of, load, requests
from tests.gpu.models import ONE_BILLION, TINY
from tests.gpu.timing import best_seconds, free_cache, name_of
from transformers import LlamaConfig

from gpu_check.plugin import CheckedMachine, Figures
from rlhf_common.samples import SampleRequest
from rlhf_workers.failures import WorkError
from rlhf_workers.generation.torch_engine.capture import capture_for
from rlhf_workers.generation.torch_engine.engine import TorchEngine

AIM: Final = 0.6
"""Share of the bandwidth limit, at a batch of 1 to AIM_BATCH in bfloat16."""
AIM_BATCH: Final = 16
TIES: Final = {torch.float32: 1e-3, torch.bfloat16: 0.125}
"""Largest amount by which a greedy token's logit may be below the best one on the same text, in one pass of
transformers. Kernels of other shapes break near ties differently, and bfloat16 resolves a generated model's logits,
about 4, in steps of 0.03. All tokens after a tie belong to another text, so the share of equal tokens says little.
"""


@dataclass(frozen=True)
class DecodedSizes:
    """Sizes of the model and of the decoded samples."""

    config: LlamaConfig
    batches: tuple[int, ...]
    prompt: int
    tokens: int
    greedy_samples: int

    def samples(self, count: int) -> list[SampleRequest]:
        """Return this number of samples."""
        return requests(count, self.prompt, self.tokens, self.config.vocab_size)


SMALL = DecodedSizes(TINY, batches=(2,), prompt=8, tokens=8, greedy_samples=2)
LARGE = DecodedSizes(ONE_BILLION, (1, 2, 4, 8, 16, 32, 64, 128, 256), prompt=256, tokens=64, greedy_samples=16)


@pytest.mark.gpu(seconds=150, gigabytes=20)
def test_decode(machine: CheckedMachine, figures: Figures) -> None:
    """The torch engine decodes the greedy tokens of transformers, at 60% of the bandwidth limit and more."""
    transformers.utils.logging.set_verbosity_error()
    sizes = machine.sized(SMALL, LARGE)
    for dtype in machine.dtypes:
        name = name_of(dtype)
        figures.say(f"making a model in {name}")
        model = load(machine, sizes.config, dtype)
        same_greedy_tokens(model, sizes, figures, name)
        least = throughput(machine, model, sizes, figures, name)
        if dtype == torch.bfloat16 and machine.cuda and not machine.small:
            best = max(least.values())
            figures.add("least_share_of_the_limit", best, f"at a batch of 1 to {AIM_BATCH}, the best way")
            figures.check(f"at least {AIM:.0%} of the bandwidth limit", best >= AIM, str(least))
        matrix_products(model, figures, name)
        for rows in sorted({sizes.batches[0], sizes.batches[-1]}):
            prompts = prompts_of(model, sizes.samples(rows))
            decode = partial(generate, model, prompts, sizes.tokens, do_sample=True)
            seconds = best_seconds(decode, 1, model.device)
            figures.row(
                "transformers_generate", dtype=name, batch=rows, tokens_per_second=rows * sizes.tokens / seconds
            )
        del model
        free_cache()


def engines(
    model: Any, rows: int, sizes: DecodedSizes, figures: Figures, *, greedy: bool = False
) -> Iterator[tuple[str, TorchEngine]]:
    """Yield each way and its engine; one that does not start fails a check, and the others continue."""
    for way, arguments in WAYS.items():
        gc.collect()  # the graphs and caches of the previous engine are freed first
        try:
            yield way, engine_of(model, rows, sizes.prompt, sizes.tokens + 8, greedy=greedy, **arguments)
        except WorkError as error:
            figures.check(f"{model.dtype}, {way}, batch {rows}: the engine starts", False, str(error))


def prompts_of(model: Any, samples: list[SampleRequest]) -> torch.Tensor:
    """Return prompts [samples, tokens] on the model's device."""
    return torch.from_numpy(np.stack([sample.prompt for sample in samples]).astype(np.int64)).to(model.device)


def generate(model: Any, prompts: torch.Tensor, tokens: int, **sampling: Any) -> torch.Tensor:
    """Return the output of transformers: prompts and `tokens` more tokens."""
    mask, ends = torch.ones_like(prompts), {"eos_token_id": None, "pad_token_id": 0}
    with torch.inference_mode():
        whole: torch.Tensor = model.generate(
            prompts, attention_mask=mask, top_k=0, max_new_tokens=tokens, **ends, **sampling
        )
    return whole


def same_greedy_tokens(model: Any, sizes: DecodedSizes, figures: Figures, name: str) -> None:
    """Compare every way of decoding with transformers.generate."""
    samples = sizes.samples(sizes.greedy_samples)
    prompts = prompts_of(model, samples)
    wanted = generate(model, prompts, sizes.tokens, do_sample=False)[:, sizes.prompt :]
    theirs = shortfall(model, prompts, wanted)
    figures.add(f"{name}_generate_shortfall", theirs, "of a logit, of the tokens of transformers.generate")
    most = max(TIES[model.dtype], 2 * theirs)
    for way, engine in engines(model, len(samples), sizes, figures, greedy=True):
        found = decoded(engine, samples)
        got = torch.tensor([found[index] for index in range(len(samples))], device=model.device)
        ours, share = shortfall(model, prompts, got), float((got == wanted).float().mean())
        figures.add(f"{name}_{way}_greedy_agreement", share, "of the tokens of transformers.generate")
        figures.check(
            f"{name}, {way}: every greedy token is the best one of transformers, or a tie",
            ours <= most,
            f"a logit falls short by {ours:.3g} at most, {most:.3g} are allowed; {share:.1%} of the tokens are equal",
        )


def shortfall(model: Any, prompts: torch.Tensor, tokens: torch.Tensor) -> float:
    """Return the largest amount by which a token's logit [samples, tokens] is below the best one at its place."""
    most = 0.0
    for prompt, chosen in zip(prompts, tokens, strict=True):
        text = torch.cat([prompt, chosen])[None]
        with torch.inference_mode():
            logits = model(text[:, :-1], use_cache=False, logits_to_keep=len(chosen)).logits[0].float()
        short = logits.amax(-1) - logits.gather(-1, chosen[:, None].long())[:, 0]
        most = max(most, float(short.max()))
    return most


def step_seconds(engine: TorchEngine, samples: list[SampleRequest], tokens: int) -> float:
    """Return the median step of the last half of a run that decodes everything, without prefill and captures."""
    engine.submit(samples)
    times = []
    while engine.in_flight:
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    return float(np.median(times[-max(tokens // 2, 1) : -1]))


def limit_seconds(model: Any, engine: TorchEngine, rows: int, keys: float, bytes_per_second: float) -> float:
    """Return a step's least time: weights and caches read once, with the caches of `keys` tokens in each row."""
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return float(weights + rows * keys * engine.moves.bytes_per_token) / bytes_per_second


def copy_rate(machine: CheckedMachine) -> float:
    """Return bytes per second, measured by the first step or here."""
    recorded = machine.measured("machine", "memory_gb_per_second")
    if recorded is not None:
        return recorded * 1e9
    source = torch.ones(machine.sized(16, 2048) << 20, dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(source)
    return 2 * source.numel() / best_seconds(lambda: target.copy_(source), 3, machine.device)


def throughput(
    machine: CheckedMachine, model: Any, sizes: DecodedSizes, figures: Figures, name: str
) -> dict[str, float]:
    """Record tokens per second by batch and way; return the least share of the limit up to AIM_BATCH, by way."""
    rate, least = copy_rate(machine), dict.fromkeys(WAYS, float("inf"))
    for rows in sizes.batches if model.dtype == torch.bfloat16 else sizes.batches[::4]:
        for way, engine in engines(model, rows, sizes, figures):
            seconds = step_seconds(engine, sizes.samples(rows), sizes.tokens)
            share = limit_seconds(model, engine, rows, sizes.prompt + 0.75 * sizes.tokens, rate) / seconds
            graphs = engine.graphs
            captures = 0 if graphs is None else graphs.captures
            if rows <= AIM_BATCH:
                least[way] = min(least[way], share)
            figures.row(
                "tokens_per_second",
                dtype=name,
                way=way,
                batch=rows,
                tokens_per_second=rows / seconds,
                milliseconds_a_step=1e3 * seconds,
                share_of_the_limit=share,
                graphs=captures,
                capture_ms=graphs.capture_ns / captures / 1e6 if graphs is not None and captures else 0,
                graph_mb=engine.graph_bytes() / 1e6,
            )
            if graphs is not None:
                figures.check(f"{name}, {way}, batch {rows}: passes were captured", not graphs.failures, f"{graphs}")
            del engine, graphs
    return least


def matrix_products(model: Any, figures: Figures, name: str) -> None:
    """Record the read rate of each kind of weights when few rows are multiplied, which bounds a fused pass."""
    layers = model.model.layers
    kinds = {
        "query": [layer.self_attn.q_proj for layer in layers],
        "key": [layer.self_attn.k_proj for layer in layers],
        "out": [layer.self_attn.o_proj for layer in layers],
        "gate": [layer.mlp.gate_proj for layer in layers],
        "down": [layer.mlp.down_proj for layer in layers],
        "head": [model.lm_head],
    }
    for kind, matrices in kinds.items():
        size = sum(matrix.weight.numel() * matrix.weight.element_size() for matrix in matrices)
        for rows in (1, AIM_BATCH):
            x = torch.randn(rows, matrices[0].in_features, device=model.device).to(model.dtype)

            def multiply(x: torch.Tensor = x, matrices: list[Any] = matrices) -> None:
                for matrix in matrices:
                    matrix(x)

            with torch.inference_mode():
                multiply()
                seconds = best_seconds(capture_for(model.device).capture(multiply).replay, 3, model.device)
            cells = {"megabytes_each": size / len(matrices) / 1e6, "gb_per_second": size / seconds / 1e9}
            figures.row("matrix_products", dtype=name, kind=kind, batch=rows, **cells)
