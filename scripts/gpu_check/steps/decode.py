"""The torch engine against transformers and the memory-bandwidth limit, with and without captured passes.

The limit of a step: every weight and every key and value of the batch is read once, at the rate at which this machine
copies. A made-up model has no end of sequence among its stop tokens, so all decode as many tokens.
"""

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers

from gpu_check.random_models import ONE_BILLION, TINY, LlamaShape, write_model
from gpu_check.step import CheckedMachine, CheckStep, Report
from gpu_check.timing import best_seconds
from rlhf_api.samples import SampleKey, SampleRequest
from rlhf_workers.failures import WorkError
from rlhf_workers.generation.engine import EngineLimits, SamplingParameters
from rlhf_workers.generation.torch_engine.capture import capture_for
from rlhf_workers.generation.torch_engine.engine import TorchEngine
from rlhf_workers.generation.torch_engine.forward_choice import KernelMode
from rlhf_workers.models.loading import load_causal_lm

AIM: Final = 0.6
"""Share of the bandwidth limit, at a batch of 1 to AIM_BATCH in bfloat16."""
AIM_BATCH: Final = 16
TIES: Final = {torch.float32: 1e-3, torch.bfloat16: 0.125}
"""By which the logit of a greedy token may fall short of the best one on the same text, as transformers computes it in
one pass: kernels of other shapes break near ties otherwise, and bfloat16 knows the logits of a made-up model, some 4,
by steps of 0.03. All tokens after a tie are those of another text, so how many agree says little."""


@dataclass(frozen=True)
class DecodedSizes:
    """Of the model and what is decoded."""

    shape: LlamaShape
    batches: tuple[int, ...]
    prompt: int
    tokens: int
    """Decoded by every timed run."""
    greedy_samples: int
    greedy_tokens: int


class EndlessText:
    """No token ends a response."""

    eos_token_id = None


def engine_of(
    model: Any, rows: int, sizes: DecodedSizes, *, static: bool, kernels: KernelMode = "Disabled", greedy: bool = False
) -> TorchEngine:
    """Return an engine over a model that was loaded."""
    limits = EngineLimits(rows, sizes.prompt, max(sizes.tokens, sizes.greedy_tokens) + 8)
    sampling = SamplingParameters(temperature=0 if greedy else 1)
    return TorchEngine(
        model, EndlessText(), sampling, limits, deterministic=False, static_shapes=static, fused_kernels=kernels
    )


def engines(
    model: Any, rows: int, sizes: DecodedSizes, report: Report, *, greedy: bool = False
) -> Iterator[tuple[str, TorchEngine]]:
    """Each way and an engine of it; one that cannot be had fails a check, and the others go on."""
    for way, arguments in WAYS.items():
        gc.collect()  # the graphs and caches of the engine before go first
        try:
            yield way, engine_of(model, rows, sizes, greedy=greedy, **arguments)
        except WorkError as error:
            report.check(f"{model.dtype}, {way}, batch {rows}: the engine starts", False, str(error))


def requests(count: int, prompt: int, tokens: int, vocabulary: int) -> list[SampleRequest]:
    """Random prompts of one length."""
    random = np.random.default_rng(0)
    return [
        SampleRequest(
            SampleKey(0, index, 0), random.integers(1, vocabulary, prompt).astype(np.int32), index + 1, tokens
        )
        for index in range(count)
    ]


def decoded(engine: TorchEngine, samples: list[SampleRequest]) -> dict[int, list[int]]:
    """Tokens by sample."""
    engine.submit(samples)
    tokens: dict[int, list[int]] = {}
    while engine.held:
        tokens |= {response.key.sample: response.tokens.tolist() for response in engine.step().finished}
    return tokens


def step_seconds(engine: TorchEngine, samples: list[SampleRequest], tokens: int) -> float:
    """The median step of the last half of a run that decodes everything, prefill and captures outside it."""
    engine.submit(samples)
    times = []
    while engine.held:
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    return float(np.median(times[-max(tokens // 2, 1) : -1]))


def same_greedy_tokens(model: Any, sizes: DecodedSizes, report: Report, name: str) -> None:
    """Compares every way of decoding with transformers.generate."""
    samples = requests(sizes.greedy_samples, sizes.prompt, sizes.greedy_tokens, sizes.shape.vocabulary)
    prompts = torch.from_numpy(np.stack([sample.prompt for sample in samples]).astype(np.int64)).to(model.device)
    with torch.inference_mode():
        whole = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            max_new_tokens=sizes.greedy_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
    wanted = whole[:, sizes.prompt :]
    theirs = shortfall(model, prompts, wanted)
    report.figure(f"{name}_generate_shortfall", theirs, "of a logit, of the tokens of transformers.generate")
    most = max(TIES[model.dtype], 2 * theirs)
    for way, engine in engines(model, sizes.greedy_samples, sizes, report, greedy=True):
        found = decoded(engine, samples)
        got = torch.tensor([found[index] for index in range(len(samples))], device=model.device)
        ours, share = shortfall(model, prompts, got), float((got == wanted).float().mean())
        report.figure(f"{name}_{way}_greedy_agreement", share, "of the tokens of transformers.generate")
        report.check(
            f"{name}, {way}: every greedy token is the best one of transformers, or a tie",
            ours <= most,
            f"a logit falls short by {ours:.3g} at most, {most:.3g} are allowed; {share:.1%} of the tokens are equal",
        )


def shortfall(model: Any, prompts: torch.Tensor, tokens: torch.Tensor) -> float:
    """Return the most by which the logit of a token [samples, tokens] is below the best one after the same text."""
    most = 0.0
    with torch.inference_mode():
        for prompt, chosen in zip(prompts, tokens, strict=True):
            text = torch.cat([prompt, chosen])[None]
            logits = model(text[:, :-1], use_cache=False, logits_to_keep=len(chosen)).logits[0].float()
            short = logits.amax(-1) - logits.gather(-1, chosen[:, None].long())[:, 0]
            most = max(most, float(short.max()))
    return most


WAYS: Final[dict[str, dict[str, Any]]] = {
    "plain": {"static": False},
    "captured": {"static": True},
    "fused": {"static": True, "kernels": "Enabled"},
}
"""Ways of decoding: `captured` passes of the model's own kernels, and `fused` ones."""


def limit_seconds(model: Any, engine: TorchEngine, rows: int, keys: float, bytes_per_second: float) -> float:
    """A step's least time: weights and caches read once. `keys` of each row."""
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    if not model.config.tie_word_embeddings:
        embedding = model.get_input_embeddings().weight
        weights -= embedding.numel() * embedding.element_size()  # of these a row is read
    return float(weights + rows * keys * engine.moves.bytes_per_token) / bytes_per_second


def copy_rate(machine: CheckedMachine) -> float:
    """Bytes a second, measured by the first step or here."""
    known = machine.measured("machine", "memory_gb_per_second")
    if known is not None:
        return known * 1e9
    device = torch.device(machine.device)
    source = torch.ones((2 << 30) if machine.cuda else (16 << 20), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / best_seconds(lambda: target.copy_(source), 3, device)


def throughput(machine: CheckedMachine, model: Any, sizes: DecodedSizes, report: Report, name: str) -> dict[str, float]:
    """Tokens a second by batch and way; the least share of the limit up to AIM_BATCH, by way."""
    rate, least = copy_rate(machine), dict.fromkeys(WAYS, float("inf"))
    for rows in sizes.batches if model.dtype == torch.bfloat16 else sizes.batches[::4]:
        samples = requests(rows, sizes.prompt, sizes.tokens, sizes.shape.vocabulary)
        for way, engine in engines(model, rows, sizes, report):
            seconds = step_seconds(engine, samples, sizes.tokens)
            limit = limit_seconds(model, engine, rows, sizes.prompt + 0.75 * sizes.tokens, rate)
            figures = engine.graphs
            if rows <= AIM_BATCH:
                least[way] = min(least[way], limit / seconds)
            report.row(
                "tokens_per_second",
                dtype=name,
                way=way,
                batch=rows,
                tokens_per_second=rows / seconds,
                milliseconds_a_step=1e3 * seconds,
                share_of_the_limit=limit / seconds,
                graphs=0 if figures is None else figures.captures,
                capture_ms=0
                if figures is None or not figures.captures
                else figures.capture_ns / figures.captures / 1e6,
                graph_mb=engine.graph_bytes() / 1e6,
            )
            if figures is not None:
                report.check(f"{name}, {way}, batch {rows}: passes were captured", not figures.failures, f"{figures}")
            del engine, figures
    return least


def transformers_rate(model: Any, sizes: DecodedSizes, report: Report, name: str) -> None:
    """Times transformers.generate on the smallest batch, and on the largest."""
    for rows in sorted({sizes.batches[0], sizes.batches[-1]}):
        samples = requests(rows, sizes.prompt, sizes.tokens, sizes.shape.vocabulary)
        prompts = torch.from_numpy(np.stack([sample.prompt for sample in samples]).astype(np.int64)).to(model.device)

        def generate(prompts: torch.Tensor = prompts) -> None:
            with torch.inference_mode():
                model.generate(
                    prompts,
                    attention_mask=torch.ones_like(prompts),
                    do_sample=True,
                    top_k=0,
                    max_new_tokens=sizes.tokens,
                    eos_token_id=None,
                    pad_token_id=0,
                )

        seconds = best_seconds(generate, 1, model.device)
        report.row("transformers_generate", dtype=name, batch=rows, tokens_per_second=rows * sizes.tokens / seconds)


def matrix_products(model: Any, report: Report, name: str) -> None:
    """How fast the weights of each kind are read when few rows are multiplied by them: what a fused pass waits for."""
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
        for rows in (1, AIM_BATCH):
            x = torch.randn(rows, matrices[0].in_features, device=model.device).to(model.dtype)

            def multiply(x: torch.Tensor = x, matrices: list[Any] = matrices) -> None:
                for matrix in matrices:
                    matrix(x)

            with torch.inference_mode():
                multiply()
                replay = capture_for(model.device).capture(multiply).replay
                seconds = best_seconds(replay, 3, model.device)
            size = sum(matrix.weight.numel() * matrix.weight.element_size() for matrix in matrices)
            report.row(
                "matrix_products",
                dtype=name,
                kind=kind,
                batch=rows,
                megabytes_each=size / len(matrices) / 1e6,
                gb_per_second=size / seconds / 1e9,
            )


def load(machine: CheckedMachine, sizes: DecodedSizes, dtype: torch.dtype) -> Any:
    """A model as a job loads it."""
    folder = Path(machine.scratch) / str(dtype)
    write_model(folder, sizes.shape, dtype, device=machine.device, fast=True)
    device = torch.device(machine.device)
    model = load_causal_lm(str(folder), field="model", dtype=dtype, device=device, attention="sdpa")
    model.generation_config.eos_token_id = None  # every sample decodes as many tokens
    return model


def run(machine: CheckedMachine, sizes: DecodedSizes, report: Report) -> None:
    """In bfloat16 for what must be fast, in float32 for what must be equal."""
    transformers.utils.logging.set_verbosity_error()
    dtypes = (torch.bfloat16, torch.float32) if machine.bfloat16 or not machine.cuda else (torch.float32,)
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        report.say(f"making a model in {name}")
        model = load(machine, sizes, dtype)
        same_greedy_tokens(model, sizes, report, name)
        least = throughput(machine, model, sizes, report, name)
        if dtype == torch.bfloat16 and machine.cuda and not machine.small:
            best = max(least.values())
            report.figure("least_share_of_the_limit", best, f"at a batch of 1 to {AIM_BATCH}, the best way")
            report.check(f"at least {AIM:.0%} of the bandwidth limit", best >= AIM, str(least))
        matrix_products(model, report, name)
        transformers_rate(model, sizes, report, name)
        del model
        if machine.cuda:
            torch.cuda.empty_cache()


STEP = CheckStep(
    "decode",
    "the torch engine decodes the greedy tokens of transformers, at 60% of the bandwidth limit and more",
    run,
    small=DecodedSizes(TINY, batches=(2,), prompt=8, tokens=8, greedy_samples=2, greedy_tokens=8),
    gpu=DecodedSizes(
        ONE_BILLION, (1, 2, 4, 8, 16, 32, 64, 128, 256), prompt=256, tokens=64, greedy_samples=16, greedy_tokens=64
    ),
    limit_seconds=150,
    small_limit_seconds=180,
    gpu_gigabytes=20,
)
