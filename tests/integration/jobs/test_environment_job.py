"""A real job with several turns: it learns to ask a calculator, and ends with the same weights despite kills."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.jobs.chaos import Ended, Kills, assert_same_weights, run_job
from tests.support.jobs.local_job import HELD, HELD_SECONDS

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

CHAT = (
    "{% for message in messages %}{% if message.role == 'user' %}{{ message.content }}"
    "{% elif message.role == 'assistant' %}{{ message.content + eos_token }}"
    "{% else %}{{ ':' + message.content + ';' }}{% endif %}{% endfor %}"
)
"""Chat template with the same texts as the example's environment."""
EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "calculator"
ITERATIONS = 12


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calculator")
    prepare = [sys.executable, str(EXAMPLE / "prepare.py"), "--folder", str(folder / "assets")]
    subprocess.run(prepare, check=True, capture_output=True, timeout=600)
    source = f"{HELD}\n{(EXAMPLE / 'environment.py').read_text()}\nCalculator.step = held(Calculator.step)\n"
    (folder / "environment.py").write_text(source)
    job: dict[str, Any] = yaml.safe_load((EXAMPLE / "job.yaml").read_text())
    job["spec"] |= {"iterations": ITERATIONS, "deterministic": True, "runPolicy": {"backoffLimit": 1000}}
    job["spec"]["rollout"]["environment"]["timeoutSeconds"] = HELD_SECONDS
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return folder / "job.yaml"


@pytest.fixture(scope="module")
def straight(manifest: Path) -> Ended:
    return run_job(manifest, manifest.parent / "straight")


def test_it_learns_to_ask_and_to_repeat_the_answer(straight: Ended) -> None:
    lines = straight.lines
    assert lines[0]["reward"] < 0.5
    assert max(line["reward"] for line in lines) > 0.75, [line["reward"] for line in lines]
    assert lines[-1]["rewards/reward/metrics/turns"] > 1.5, "most ask, and go on after the answer"
    mismatches = [line["training/actor/mismatch_max"] for line in lines]
    assert max(mismatches) < 1e-3, "the ranks see the tokens that the engine saw"


@pytest.fixture
def chat(manifest: Path, tmp_path: Path) -> Path:
    """Write the same job for a policy with a chat template, whose environment answers with messages."""
    shutil.copytree(manifest.parent / "assets", tmp_path / "assets")
    (tmp_path / "assets" / "policy" / "chat_template.jinja").write_text(CHAT)
    text, asked = (manifest.parent / "environment.py").read_text(), '{"message": f":{product};", "reward": 0.0}'
    assert asked in text
    said = '{"messages": [{"role": "tool", "content": product}], "reward": 0.0}'
    (tmp_path / "environment.py").write_text(text.replace(asked, said))
    job = yaml.safe_load(manifest.read_text())
    job["spec"]["prompts"]["chatTemplate"] = True
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    return tmp_path / "job.yaml"


def test_whoever_is_killed_it_ends_in_the_same_weights_by_chat_messages_too(
    manifest: Path, chat: Path, straight: Ended
) -> None:
    victims = ("generation-0", "coordinator", "generation-1")
    kills = Kills(3, 3, victims, victims, longest_calm_seconds=0.4, iterations_between=1)
    assert_same_weights(run_job(chat, manifest.parent / "killed", kills=kills), straight)


@pytest.mark.parametrize("staleness", [0, 2])
def test_more_conversations_than_the_batch_are_begun_and_cut_off_between_turns(
    manifest: Path, tmp_path: Path, staleness: int
) -> None:
    """With a staleness they continue in the next iteration from any turn."""
    more = 2
    sizes = (f"rollout.oversample={more}", f"rollout.maxStaleness={staleness}")
    settings = ("deterministic=false", *sizes, f"checkpoints={{path: kept-{staleness}, every: 1}}")
    kills = Kills(5, 2, ["generation-1", "coordinator"], longest_calm_seconds=0.5, iterations_between=1)
    lines = run_job(manifest, tmp_path / "run", settings=settings, kills=kills).lines
    assert [line["iteration"] for line in lines] == list(range(ITERATIONS))
    group_size = yaml.safe_load(manifest.read_text())["spec"]["algorithm"]["grpo"]["groupSize"]
    for line in lines:
        assert line["samples/cut"] == more * group_size
        assert ("samples/carried" in line) == (staleness > 0)
        assert line["samples/failed"] == line["samples/abstained"] == 0
        assert line["training/actor/mismatch_max"] < 1e-3, "no late answer came into another sample"


def test_an_environment_that_raises_fails_its_sample_with_its_words(manifest: Path, tmp_path: Path) -> None:
    shutil.copytree(manifest.parent / "assets", tmp_path / "assets")
    text = (EXAMPLE / "environment.py").read_text()
    raising = text.replace("self.questions += 1", "raise RuntimeError('out of ' + 'batteries')")
    (tmp_path / "environment.py").write_text(raising)
    shutil.copy(EXAMPLE / "job.yaml", tmp_path / "job.yaml")
    run = run_job(tmp_path / "job.yaml", tmp_path / "run", code=None)
    assert run.code not in (0, -1)
    assert "environment.py:" in run.output
    assert "RuntimeError: out of batteries" in run.output, run.output[-3000:]
