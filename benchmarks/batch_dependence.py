"""How far a sample's tokens and log-probabilities depend on the rest of its batch and on drafts, by engine, precision.

    python benchmarks/batch_dependence.py --json [--engines torch vllm] [--modes fast deterministic]

Tokens are drawn by the sample's key, so that other tokens can only come of other logits: of kernels that sum in another
order when the batch has another shape. The same samples are decoded in one full batch, in small ones, alone, and once
more from the first half of their tokens (as after a withdrawal: these are computed in one pass instead of one by one),
and with drafts of four tokens of which six in ten are right, so that several positions of a sample share a pass. The
deterministic mode is the torch engine's, in float32; "engine, deterministic" in what is printed.
Each run is compared with the full batch: how many samples part from it, at which token, and how far log-probabilities
are apart up to there. The tokens of the full batch also go through one pass of transformers each, in the same precision
and in float32. The last line of --json is one object.
"""

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import transformers
from tokenizers import Tokenizer, models

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.known_responses import KnownResponses

from rlhf_api.job import RLHFJob
from rlhf_api.job.groups import ComputeType
from rlhf_api.samples import ResponsePart, SampleKey, SampleRequest, VersionSpan
from rlhf_workers.devices.device import device_name
from rlhf_workers.generation.engine import Engine
from rlhf_workers.generation.engine_registry import build_engine
from rlhf_workers.generation.speculation.speculator import Speculator
from rlhf_workers.generation.torch_engine.buckets import pass_widths
from rlhf_workers.generation.torch_engine.engine import TorchEngine
from rlhf_workers.generation.vllm_engine.engine import VllmEngine
from rlhf_workers.models.loading import load_tokenizer
from rlhf_workers.models.precision import DTYPES

VOCABULARY: Final = 1024
PROMPT: Final = 32
"""Tokens of the longest prompt."""
SMALL_BATCH: Final = 7
"""No multiple of anything a kernel is made for."""
DRAFT: Final = 4
"""Tokens of a draft."""
ACCEPTED: Final = 0.6
"""Of them, where those before were."""
PRECISIONS: Final[tuple[ComputeType, ...]] = ("Float32", "BFloat16")

Responses = Mapping[int, ResponsePart]


@dataclass(frozen=True)
class Difference:
    """A run against the full batch."""

    engine: str
    precision: str
    run: str
    samples: int
    tokens: int
    """Of all samples up to where they part."""
    parted: int
    """Samples with another token than in the full batch."""
    first_tokens: tuple[int, ...]
    """The response positions where they part, in order."""
    largest: float
    """Largest difference of log-probabilities of equal tokens, in nats."""
    mean: float
    """Mean of the magnitudes."""


def write_model(folder: Path, arguments: argparse.Namespace) -> Path:
    """A random Llama whose distributions are neither flat nor sharp."""
    torch.manual_seed(0)
    heads = arguments.hidden // arguments.head
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.hidden * 8 // 3 // 32 * 32,
        num_hidden_layers=arguments.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        max_position_embeddings=2048,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"<{index}>": index for index in range(VOCABULARY)}, unk_token="<0>"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<0>").save_pretrained(folder)
    return folder


def build(
    folder: Path, engine: str, precision: ComputeType, arguments: argparse.Namespace, *, deterministic: bool
) -> Engine:
    """The engine of a job with this model, as a worker builds it."""
    job = RLHFJob.model_validate(
        {
            "apiVersion": "rlhf.dev/v1alpha1",
            "kind": "RLHFJob",
            "metadata": {"name": "batch-dependence"},
            "spec": {
                "algorithm": {"grpo": {}},
                "deterministic": deterministic,
                "models": {"actor": {"path": str(folder)}, "reward": {"function": {"file": "reward.py"}}},
                "prompts": {"path": "prompts.jsonl"},
                "rollout": {"maxPromptTokens": PROMPT, "maxResponseTokens": arguments.response},
                "generation": {
                    "engine": engine,
                    "maxBatchSize": arguments.samples,
                    "speculation": {"mode": "Disabled"},
                },
                "training": {"precision": precision},
            },
        }
    )
    return build_engine(job.spec, load_tokenizer(str(folder), "model"), torch.device(arguments.device))


def build_requests(arguments: argparse.Namespace) -> list[SampleRequest]:
    """Samples with random prompts and keys; every response has its full length."""
    random = np.random.default_rng(0)
    return [
        SampleRequest(
            SampleKey(0, index, 0),
            random.integers(1, VOCABULARY, random.integers(PROMPT // 2, PROMPT + 1)).astype(np.int32),
            int(random.integers(2**63)),
            arguments.response,
        )
        for index in range(arguments.samples)
    ]


def decode(engine: Engine, requests: Sequence[SampleRequest], batch: int) -> Responses:
    """Responses by sample, decoded `batch` at a time."""
    done: dict[int, ResponsePart] = {}
    for first in range(0, len(requests), batch):
        engine.submit(requests[first : first + batch])
        while engine.held:
            done |= {response.key.sample: response for response in engine.step().finished}
    return done


def decode_drafted(engine: Engine, requests: Sequence[SampleRequest], responses: Responses) -> Responses:
    """Responses by sample, all at once, with drafts by one who knows what is drawn without."""
    assert isinstance(engine, TorchEngine | VllmEngine)
    known = {number: response.tokens.tolist() for number, response in responses.items()}
    most = len(requests) * (DRAFT + 1)
    widths = (
        engine.draft_widths if isinstance(engine, VllmEngine)
        else pass_widths(most, tiled=engine.deterministic, static=False)
    )  # fmt: skip
    drafter = KnownResponses(ACCEPTED, known, VOCABULARY)
    engine.draft_by(Speculator([drafter], mode="Fixed", longest=DRAFT, widths=widths))
    drafted = decode(engine, requests, len(requests))
    engine.draft_by(None)
    return drafted


def resumed(requests: Sequence[SampleRequest], responses: Responses) -> list[SampleRequest]:
    """The same samples with the first half of their tokens."""
    half = requests[0].max_response_tokens // 2
    return [
        replace(
            request,
            key=request.key._replace(attempt=1),
            tokens=responses[request.key.sample].tokens[:half],
            log_probabilities=responses[request.key.sample].log_probabilities[:half],
            versions=(VersionSpan(0, half),),
        )
        for request in requests
    ]


def compare(wanted: Responses, got: Responses, engine: str, precision: str, run: str, start: int = 0) -> Difference:
    """`start` is the first position that was decoded anew."""
    apart: list[npt.NDArray[np.float32]] = []
    first_tokens = []
    for number, one in wanted.items():
        other = got[number]
        unequal = np.flatnonzero(one.tokens != other.tokens)
        stop = int(unequal[0]) if unequal.size else len(one.tokens)
        first_tokens += [stop] if unequal.size else []
        apart.append(np.abs(one.log_probabilities[start:stop] - other.log_probabilities[start:stop]))
    return _difference(apart, engine, precision, run, len(wanted), sorted(first_tokens))


def against_transformers(
    responses: Responses, requests: Sequence[SampleRequest], model: Any, engine: str, precision: str, run: str
) -> Difference:
    """Log-probabilities of the engine's tokens under one pass of transformers a sample."""
    apart = []
    for request in requests:
        response = responses[request.key.sample]
        whole = torch.from_numpy(np.concatenate([request.prompt, response.tokens]).astype(np.int64)).to(model.device)
        with torch.inference_mode():
            logits = model(whole[None], use_cache=False).logits[0, len(request.prompt) - 1 : -1].float()
        wanted = torch.log_softmax(logits, -1).gather(1, whole[len(request.prompt) :, None])[:, 0]
        apart.append(np.abs(response.log_probabilities - wanted.cpu().numpy()))
    return _difference(apart, engine, precision, run, len(responses), [])


def _difference(
    apart: Sequence[npt.NDArray[np.float32]], engine: str, precision: str, run: str, samples: int, first: Sequence[int]
) -> Difference:
    every = np.concatenate(apart)
    largest, mean = float(every.max(initial=0.0)), float(every.mean()) if every.size else 0.0
    return Difference(engine, precision, run, samples, len(every), len(first), tuple(first), largest, mean)


def measure(arguments: argparse.Namespace) -> list[Difference]:
    """Every engine, precision and mode."""
    requests, results = build_requests(arguments), []
    with tempfile.TemporaryDirectory(prefix="rlhf-batch-") as scratch:
        folder = write_model(Path(scratch), arguments)
        for precision in PRECISIONS:
            dtypes = {"the same precision": DTYPES[precision], "float32": torch.float32}
            passes = {
                name: transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(arguments.device).eval()
                for name, dtype in dtypes.items()
            }
            ways = [(name, mode == "deterministic") for name in arguments.engines for mode in arguments.modes]
            for name, deterministic in ways:
                if deterministic and (name != "torch" or precision != "Float32"):
                    continue
                engine = build(folder, name, precision, arguments, deterministic=deterministic)
                shown = f"{name}, deterministic" if deterministic else name
                results += of_engine(engine, requests, passes, shown, precision)
    return results


def of_engine(
    engine: Engine, requests: Sequence[SampleRequest], passes: Mapping[str, Any], name: str, precision: str
) -> list[Difference]:
    """One engine in every run, and beside transformers."""
    full = decode(engine, requests, len(requests))
    runs = {f"batches of {SMALL_BATCH}": SMALL_BATCH, "alone": 1}
    results = [compare(full, decode(engine, requests, size), name, precision, run) for run, size in runs.items()]
    again, half = decode(engine, resumed(requests, full), len(requests)), requests[0].max_response_tokens // 2
    results.append(compare(full, again, name, precision, "resumed from half", half))
    results.append(compare(full, decode_drafted(engine, requests, full), name, precision, "with drafts"))
    return results + [
        against_transformers(full, requests, model, name, precision, f"transformers, {what}")
        for what, model in passes.items()
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one object as the last line")
    parser.add_argument("--engines", nargs="+", default=["torch", "vllm"])
    parser.add_argument("--modes", nargs="+", default=["fast"], choices=["fast", "deterministic"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--head", type=int, default=64, help="size of an attention head")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--response", type=int, default=128, help="tokens of each")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.utils.logging.set_verbosity_error()
    differences = measure(arguments)
    for one in differences:
        first = f", parted at {min(one.first_tokens)} to {max(one.first_tokens)}" if one.parted else ""
        print(
            f"{one.engine:20} {one.precision:9} {one.run:32} {one.parted:4} of {one.samples} samples part in "
            f"{one.tokens} tokens; log-probabilities {one.mean:.1e} apart, at most {one.largest:.1e}{first}"
        )
    if arguments.json:
        names = ("threads", "hidden", "head", "layers", "samples", "response")
        machine = {"device": device_name(torch.device(arguments.device)), "machine": platform.machine()}
        setting = machine | {name: getattr(arguments, name) for name in names}
        print(json.dumps(setting | {"differences": [asdict(one) for one in differences]}))


if __name__ == "__main__":
    main()
