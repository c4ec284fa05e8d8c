"""The inference role with unfinished samples: final scores are bitwise the same for any fate of earlier ones."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.support.model_folders.models import VOCABULARY, write_policy

from rlhf_api.score_blocks import BLOCK
from rlhf_common import control_pb2 as pb
from rlhf_common.arrays import pack
from rlhf_workers.failures import WorkError
from rlhf_workers.inference import inference_role
from rlhf_workers.inference.inference_role import InferenceRole
from rlhf_workers.inference.model_scorer import LogProbabilityScorer, ValueScorer
from rlhf_workers.inference.partial_scores import PartialScore, PartialScoreStore
from rlhf_workers.models import loading as models
from rlhf_workers.outbox import SessionOutbox
from rlhf_workers.weights.fetching import FetchedWeights

CPU = torch.device("cpu")
TASKS = ("reference", "values")
PROMPT, RESPONSE = 20, 180
KNOWN = 150
"""Tokens of the response when its first blocks are requested: two of three."""
BYTES = 2 * 2 * 2 * 8 * 4
"""Bytes of a token in one model's cache: layers, keys and values, heads, size, float32."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


def tokens(sample: int, count: int) -> np.ndarray:
    return np.random.default_rng(sample).integers(3, VOCABULARY, count, dtype=np.int32)


def key(sample: int, iteration: int = 1) -> pb.SampleKey:
    return pb.SampleKey(iteration=iteration, sample=sample, attempt=4)


class ScoringBench:
    """A role and its messages."""

    def __init__(self, folder: Path, batch_tokens: int = 0, **role: Any) -> None:
        attention: models.Attention = "sdpa" if batch_tokens else "eager"
        arguments: dict[str, Any] = {"field": "", "dtype": torch.float32, "device": CPU, "attention": attention}
        self.role = InferenceRole(batch_tokens, None, **role)
        blocks = not batch_tokens
        policy = models.load_causal_lm(str(folder), **arguments)
        critic = models.load_backbone_with_value_head(str(folder), **arguments)
        torch.nn.init.normal_(critic.value_head.weight, generator=torch.Generator().manual_seed(1))
        self.role.add("reference", "reference", LogProbabilityScorer(policy, 1.0, CPU, blocks=blocks))
        self.role.add("values", "critic", ValueScorer(critic, CPU, blocks=blocks))
        self.outbox = SessionOutbox("inference-0", lambda: None)
        self._commands = 0

    def tell(self, **command: Any) -> list[pb.WorkerMessage]:
        """Return all messages after a command, until nothing is left to do."""
        self._commands += 1
        self.outbox.begin(self._commands)
        self.role.handle(pb.Command(id=self._commands, **command), self.outbox)
        while self.role.step(self.outbox):
            pass
        messages = self.outbox.unsent()
        self.outbox.sent(messages)
        assert [m.done.command_id for m in messages if m.HasField("done")] == [self._commands]
        return messages

    def ask(self, samples: Iterable[int], known_tokens: int = KNOWN, iteration: int = 1) -> dict[int, pb.ScoredPrefix]:
        asked = [
            pb.PrefixSample(
                key=key(sample, iteration),
                tasks=TASKS,
                prompt=pack(tokens(sample, PROMPT)),
                response=pack(tokens(sample + 1000, known_tokens)),
            )
            for sample in samples
        ]
        messages = self.tell(score_prefix=pb.ScorePrefix(samples=asked))
        self.spans = [m.span.name for m in messages if m.HasField("span")]
        scoring = [m.observation.scoring for m in messages if m.HasField("observation")]
        assert [f"score-prefix/{item.task}" for item in scoring] == self.spans
        return {m.prefix.key.sample: m.prefix for m in messages if m.HasField("prefix")}

    def score(self, samples: Sequence[int], iteration: int = 1) -> dict[tuple[int, str], pb.ScoredSample]:
        wanted = [
            pb.ScoreSample(
                key=key(sample, iteration),
                tasks=TASKS,
                prompt=pack(tokens(sample, PROMPT)),
                response=pack(tokens(sample + 1000, RESPONSE)),
            )
            for sample in samples
        ]
        messages = self.tell(score=pb.Score(samples=wanted))
        scored = [m.scored for m in messages if m.HasField("scored")]
        assert len(scored) == len(samples) * len(TASKS)
        return {(message.key.sample, message.task): message for message in scored}


def bits(scored: dict[tuple[int, str], pb.ScoredSample]) -> dict[tuple[int, str], bytes]:
    return {place: score.result.data for place, score in scored.items()}


def early(scored: dict[tuple[int, str], pb.ScoredSample]) -> set[int]:
    return {score.early_tokens for score in scored.values()}


def test_what_was_scored_early_leaves_the_rest_and_the_same_bits(folder: Path) -> None:
    worker, plain = ScoringBench(folder), ScoringBench(folder)
    wanted = bits(plain.score([1, 2]))
    reported = worker.ask([1, 2], known_tokens=60)
    assert {sample: prefix.tokens for sample, prefix in reported.items()} == {1: BLOCK, 2: BLOCK}
    reported = worker.ask([1, 2])
    assert {sample: prefix.tokens for sample, prefix in reported.items()} == {1: 2 * BLOCK, 2: 2 * BLOCK}
    assert reported[2].cache_bytes == 2 * 2 * 2 * BLOCK * BYTES
    assert worker.spans == ["score-prefix/reference", "score-prefix/values"] * 2
    scored = worker.score([1, 2])
    assert bits(scored) == wanted
    assert early(scored) == {2 * BLOCK}
    assert worker.ask([3])[3].cache_bytes == 2 * 2 * BLOCK * BYTES, "what is scored is held no longer"


class TornWeights(FetchedWeights):
    """Weights of a peer that ended while they were copied."""

    def confirm(self) -> None:
        raise WorkError("WeightsTorn", "the peer ended the loan", retryable=True)


def test_a_critic_with_torn_weights_scores_nothing_early(folder: Path) -> None:
    kinds: list[type[FetchedWeights]] = [TornWeights, FetchedWeights]

    @contextmanager
    def fetched(*_: Any) -> Iterator[FetchedWeights]:
        critic = worker.role._tasks["values"].scorer
        assert isinstance(critic, ValueScorer)
        tensors = {name: tensor.clone() for name, tensor in critic.model.named_parameters()}
        yield kinds.pop(0)(tensors, {"stream": 1})

    worker, plain = ScoringBench(folder, weight_fetcher=fetched), ScoringBench(folder)
    with pytest.raises(WorkError, match="ended the loan"):
        worker.role.load(pb.LoadWeights(model="critic", version=1), None)
    assert worker.ask([1, 2]) == {}
    assert worker.spans == ["score-prefix/reference"] * 4
    messages = worker.tell(load_weights=pb.LoadWeights(model="critic", version=1))
    assert {m.prefix.key.sample: m.prefix.tokens for m in messages if m.HasField("prefix")} == {1: 128, 2: 128}
    scored = worker.score([1, 2])
    assert early(scored) == {2 * BLOCK}
    assert bits(scored) == bits(plain.score([1, 2]))


def test_samples_share_passes_where_bits_are_not_promised(folder: Path) -> None:
    worker, plain = ScoringBench(folder, batch_tokens=4096), ScoringBench(folder, batch_tokens=4096)
    assert {prefix.tokens for prefix in worker.ask([1, 2, 3]).values()} == {PROMPT + KNOWN - 1}
    assert worker.spans == ["score-prefix/reference", "score-prefix/values"]
    wanted, scored = plain.score([1, 2, 3, 4]), worker.score([1, 2, 3, 4])
    assert {sample for (sample, _), score in scored.items() if score.early_tokens} == {1, 2, 3}
    for place, score in scored.items():
        result, right = (np.frombuffer(item.result.data, np.float32) for item in (score, wanted[place]))
        np.testing.assert_allclose(result, right, atol=1e-4)


def test_a_sample_that_went_on_with_other_tokens_is_computed_anew(folder: Path) -> None:
    worker, plain = ScoringBench(folder), ScoringBench(folder)
    other = pb.PrefixSample(key=key(1), tasks=TASKS, prompt=pack(tokens(1, PROMPT)), response=pack(tokens(77, KNOWN)))
    worker.tell(score_prefix=pb.ScorePrefix(samples=[other]))
    reported = worker.ask([1], known_tokens=60)[1]
    assert (reported.tokens, list(reported.dropped)) == (BLOCK, [1])
    worker.tell(score_prefix=pb.ScorePrefix(samples=[other]))
    scored = worker.score([1])
    assert bits(scored) == bits(plain.score([1]))
    assert early(scored) == {0}


@pytest.mark.parametrize("budget", [0, 2 * 2 * BLOCK * BYTES])
def test_what_finds_no_room_is_dropped_and_told(folder: Path, monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    monkeypatch.setattr(inference_role, "prefix_budget", lambda _: budget)
    worker, plain = ScoringBench(folder), ScoringBench(folder)
    worker.ask([1])
    reported = worker.ask([2])[2]
    assert reported.cache_bytes <= budget
    assert reported.tokens == (2 * BLOCK if budget else 0)
    assert (1 in reported.dropped) == bool(budget)
    assert bits(worker.score([1, 2])) == bits(plain.score([1, 2]))


def test_new_weights_drop_what_their_model_scored(folder: Path, tmp_path: Path) -> None:
    worker, plain = ScoringBench(folder), ScoringBench(folder)
    critic = models.load_backbone_with_value_head(
        str(write_policy(tmp_path / "other", seed=5)), field="", dtype=torch.float32, device=CPU, attention="eager"
    )
    save_file({name: part.clone() for name, part in critic.named_parameters()}, tmp_path / "model.safetensors")
    load = pb.LoadWeights(model="critic", version=1, sources=[pb.WeightLocation(folder=str(tmp_path))])
    worker.ask([1])
    worker.tell(load_weights=load)
    plain.tell(load_weights=load)
    scored = worker.score([1])
    assert bits(scored) == bits(plain.score([1]))
    assert (scored[1, "reference"].early_tokens, scored[1, "values"].early_tokens) == (2 * BLOCK, 0)


def test_parking_a_new_session_and_a_new_iteration_drop_all(folder: Path) -> None:
    worker = ScoringBench(folder)
    worker.ask([1])
    worker.role.give_back()
    assert early(worker.score([1])) == {0}
    worker.ask([1])
    worker.tell(offload=pb.Offload(role="inference"))
    assert early(worker.score([1])) == {0}
    worker.ask([1], iteration=2)
    assert early(worker.score([1], iteration=3)) == {0}
    worker.ask([2], iteration=3)
    worker.ask([2], iteration=2)
    assert early(worker.score([2], iteration=3)) == {2 * BLOCK}, "a late hint of an earlier iteration changes nothing"


def test_a_failure_drops_the_prefix_and_no_sample(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, plain = ScoringBench(folder), ScoringBench(folder)
    scorer: Any = worker.role._tasks["values"].scorer
    chunks = scorer.chunks
    advance = chunks.advance
    monkeypatch.setattr(chunks, "advance", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no room")))
    assert worker.ask([1])[1].tokens == 0
    monkeypatch.setattr(chunks, "advance", advance)
    assert bits(worker.score([1])) == bits(plain.score([1]))


def test_the_least_recently_used_goes_first_and_whole() -> None:
    store = PartialScoreStore(budget=250)
    store.enter(0)
    for sample in (1, 2, 3):
        growing = store.update(sample, 2, tokens(sample, 9))
        for task in TASKS:
            growing.prefixes[task] = PartialScore(positions=8, layers=[(torch.zeros(5), torch.zeros(5))])  # 40 bytes
    store.make_room()
    assert store.reported() == []
    store.update(1, 0, tokens(1, 9))
    growing = store.update(3, 0, tokens(3, 9))
    growing.prefixes["values"].layers.append((torch.zeros(5), torch.zeros(5)))
    store.make_room()
    assert (store.reported(), store.bytes) == ([2], 200)
