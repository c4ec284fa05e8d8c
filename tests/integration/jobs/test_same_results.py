"""Real jobs that differ only in how they decode, score or pack: the same results, to the bit where that is promised."""

from pathlib import Path

import pytest
from tests.support.jobs.chaos import Kills, assert_same_weights, run_job
from tests.support.jobs.local_job import write_job

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

SERIAL = "fusion.intraStage.mode=Disabled"
DRAFTS = "generation.speculation"
OUTCOME = ("iteration", "reward", "tokens", "response_tokens_max")


def test_scoring_after_generation_gives_the_same_rewards_and_weights_as_scoring_beside_it(tmp_path: Path) -> None:
    manifest = write_job(tmp_path, iterations=3, algorithm="grpo")
    beside = run_job(manifest, tmp_path / "beside", settings=("inference.overlap=Enabled",))
    after = run_job(manifest, tmp_path / "after", settings=("inference.overlap=Disabled",))
    assert_same_weights(beside, after)
    assert beside.reported("reward") == after.reported("reward")
    assert len(after.lines) == 3


def test_a_bound_of_tokens_above_all_lengths_is_none(tmp_path: Path) -> None:
    manifest = write_job(tmp_path, iterations=2, every=2)
    without = run_job(manifest, tmp_path / "without", settings=(SERIAL,))
    bounded = run_job(manifest, tmp_path / "bounded", settings=(SERIAL, "training.microBatchTokens=1000000"))
    assert_same_weights(without, bounded)


def test_prefixes_scored_early_and_the_death_of_who_holds_them_change_no_bit(tmp_path: Path) -> None:
    manifest = write_job(tmp_path, iterations=3, responses=300)  # several blocks in most cases
    victims = ("inference-0",) * 2
    # When the last response arrives its scorer has prefixes; only two of the three iterations have a kill.
    kills = Kills(7, len(victims), victims[:1], first=victims, in_phases=("Scoring",) * len(victims))
    alone = ("fusion.interStage.mode=Disabled", SERIAL)
    off = run_job(manifest, tmp_path / "off", settings=(*alone, "inference.incremental=Disabled"))
    killed = run_job(manifest, tmp_path / "on", settings=(*alone, "inference.incremental=Enabled"), kills=kills)
    assert_same_weights(killed, off)
    same = (*OUTCOME, "kl", "kl_per_token", "samples/truncated")
    assert killed.reported(*same) == off.reported(*same)
    assert all(line["incremental/on"] == 1 for line in killed.lines)
    assert any(line["incremental/early_share"] > 0 for line in killed.lines), killed.lines
    assert not any("incremental/on" in line for line in off.lines)
    timelines = [run.read("timeline.json") for run in (killed, off)]
    assert ["score-prefix/reference" in text for text in timelines] == [True, False]


def test_drafts_of_a_fixed_length_and_chosen_ones_change_no_bit(tmp_path: Path) -> None:
    manifest = write_job(tmp_path, algorithm="grpo", iterations=2, responses=48)
    none, fixed, auto = (
        run_job(manifest, tmp_path / mode, settings=(f"{DRAFTS}.mode={mode}", *more))
        for mode, *more in (("Disabled",), ("Fixed", f"{DRAFTS}.maxTokens=3"), ("Auto",))
    )
    assert_same_weights(none, fixed, auto)
    assert none.total("speculation/drafted") == 0
    assert fixed.total("speculation/drafted") > 0


def test_siblings_on_different_workers_give_drafts_to_each_other(tmp_path: Path) -> None:
    """Two workers decode two samples at a time, so that later samples of a prompt have siblings elsewhere."""
    manifest = write_job(tmp_path, algorithm="grpo", iterations=2, responses=120)
    two = ("generation.maxBatchSize=2", "rollout.temperature=0.2", "fusion.interStage.mode=Disabled", SERIAL)
    siblings = (f"{DRAFTS}.mode=Fixed", f"{DRAFTS}.maxTokens=4", f'{DRAFTS}.drafters=["Siblings"]')
    plain = run_job(manifest, tmp_path / "plain", settings=(*two, f"{DRAFTS}.mode=Disabled"))
    drafted = run_job(manifest, tmp_path / "drafted", settings=(*two, *siblings))
    assert_same_weights(plain, drafted)
    same = (*OUTCOME, "training/actor/loss")
    assert plain.reported(*same) == drafted.reported(*same)
    assert plain.total("siblings/sent") == 0
    assert drafted.total("siblings/sent") > 0
    assert drafted.total("speculation/accepted") > 0


def test_the_reward_of_packed_rows_rises_as_it_does_with_padding(tmp_path: Path) -> None:
    manifest = write_job(tmp_path, algorithm="grpo", iterations=24, responses=48, learning_rate=4e-3)
    packed = run_job(manifest, tmp_path / "packed", settings=("training.packing=true",)).lines
    padded = run_job(manifest, tmp_path / "padded").lines
    assert {line["training/train/padding"] for line in packed} == {0.0}
    assert all(line["training/train/padding"] > 0 for line in padded)
    # The policies sample and train equally until rounding makes them differ.
    assert packed[0]["reward"] == padded[0]["reward"]
    norms = [line[0]["training/gradient_norm/actor"] for line in (packed, padded)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    for lines in (packed, padded):
        first, last = (sum(line["reward"] for line in part) / 4 for part in (lines[:4], lines[-4:]))
        assert last > first + 0.05
