"""The page of a run in a real browser: its content, its responsiveness, and its escaping of the run's texts."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.jobs.recorded_run import HOSTILE, add_iterations, finish_run, write_run
from tests.support.observability.browser import Browser

pytestmark = pytest.mark.full


FRAMES = """
new Promise((done) => {
  const canvas = document.getElementById('workers'), box = canvas.getBoundingClientRect(), drew = [];
  const step = (left) => {
    canvas.dispatchEvent(new WheelEvent('wheel', {
      deltaY: left % 40 < 20 ? -8 : 8, clientX: box.left + 600, clientY: box.top + 40, cancelable: true,
    }));
    requestAnimationFrame(() => requestAnimationFrame(() => {
      drew.push(Number(document.body.dataset.drew));
      left ? step(left - 1) : done(drew.sort((a, b) => a - b));
    }));
  };
  step(120);
})
"""
PAINTED = """
(id) => {
  const canvas = document.getElementById(id);
  const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data, seen = {};
  for (let at = 0; at < data.length; at += 4) {
    const name = `${data[at]},${data[at + 1]},${data[at + 2]}`;
    seen[name] = (seen[name] ?? 0) + 1;
  }
  return seen;
}
"""
TOP_LEFT = """
(() => {
  window.scrollTo(0, 0);
  const box = document.getElementById('workers').getBoundingClientRect();
  return [box.left, box.top];
})()
"""
SLIPPED = """
document.body.insertAdjacentHTML('beforeend', '<img src="http://127.0.0.1:9/" onerror="window.ran = 1">');
document.body.append(Object.assign(document.createElement('script'), { textContent: 'window.ran = 1' }));
"""
DECODE, MOVED = "59,116,217", "210,60,60"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[Any]:
    """Yield a function that serves a run folder with `rlhf view` and returns the address; Ctrl-C ends all of them."""
    started: list[subprocess.Popen[str]] = []

    def serve(folder: Path) -> str:
        command = [sys.executable, "-m", "rlhf_cli.main", "view", str(folder), "--no-browser"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"COLUMNS": "300"})
        started.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert " is shown at http://127.0.0.1:" in line, line
        return line.split(" at ")[1].split(" until ")[0]

    yield serve
    for process in started:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, "Ctrl-C is a clean end"


def words(browser: Browser, selector: str) -> str:
    """Return the visible text of an element."""
    return str(browser.do("run", script=f"document.querySelector({selector!r}).textContent"))


def hovered(browser: Browser, canvas: str, share: float, y: int) -> str:
    """Return the tooltip at this share of the width of a canvas and `y` below its top."""
    box = browser.do(
        "run",
        script=f"(() => {{ const e = document.getElementById('{canvas}'); e.scrollIntoView({{block: 'center'}}); "
        "const b = e.getBoundingClientRect(); return [b.left, b.top, b.width]; })()",
    )
    browser.do("move", x=box[0] + 108 + share * (box[2] - 108), y=box[1] + y)
    return words(browser, "#tip")


def test_a_run_is_shown_and_followed_while_it_goes_on(browser: Browser, shown: Any, tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    url, before = shown(tmp_path / "run"), browser.do("complaints")
    browser.do("open", url=url)
    assert words(browser, "#state") == "live"
    assert words(browser, "#name") == HOSTILE, "a text is shown as it is, and is no markup"
    assert words(browser, "#headline").startswith("iterations 1 to 2: 10 s each; Generating 6 s (60%)")
    assert "weight publishing" in words(browser, "#words")
    rows = browser.do(
        "run", script="[...document.querySelectorAll('#iterations tbody tr')].map((e) => e.dataset.iteration)"
    )
    assert rows == ["2", "1", "0"]
    assert browser.do("run", script=f"({PAINTED})('workers')")[DECODE] > 1000
    assert browser.do("run", script=f"({PAINTED})('samples')")[MOVED] > 10, "samples that moved are marked"

    add_iterations(tmp_path / "run", [3])
    browser.do("until", script="document.querySelector('#iterations tbody tr').dataset.iteration === '3'")
    browser.do("until", script="document.getElementById('which').textContent === '3'")
    finish_run(tmp_path / "run")
    browser.do("until", script="document.getElementById('phase').textContent.includes('Complete')")

    browser.do("click", selector="#iterations tbody tr:nth-child(2)")
    assert words(browser, "#which") == "2"
    assert "generation-0  decode" in hovered(browser, "workers", 0.05, 18 + 22 + 5)
    said = hovered(browser, "samples", 0.08, 18 + 4)
    assert said.startswith("sample 0: decoding on generation-0"), said
    assert "weights v2:" in said
    assert "reward" in said
    assert words(browser, "#step") == "step 1 of 2 of iteration 2"
    assert words(browser, "#stepwords") == "fused: measured 900 ms, predicted 700 ms"
    assert "predicted 130 ms, measured 140 ms" in hovered(browser, "schedule", 0.05, 18 + 20)
    browser.do("click", selector="#rows tbody tr")
    assert f"RESPONSE\n{HOSTILE}" in words(browser, "#whole-sample")
    heard = browser.do("complaints")
    assert heard["complaints"] == before["complaints"]
    asked = heard["requests"][len(before["requests"]) :]
    assert {request.split("?")[0] for request in asked} == {url, f"{url}delta"}


def test_zoom_pan_and_keys_change_what_is_in_view(browser: Browser, shown: Any, tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    browser.do("open", url=shown(tmp_path / "run"))

    def view() -> tuple[float, float]:
        browser.do("until", script="document.body.dataset.view !== undefined")
        start, end = str(browser.do("run", script="document.body.dataset.view")).split()
        return float(start), float(end)

    browser.do("click", selector="#whole")
    browser.do("until", script="document.getElementById('follow').getAttribute('aria-pressed') === 'false'")
    browser.do("run", script="new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    whole = view()
    box = browser.do("run", script=TOP_LEFT)
    browser.do("wheel", x=box[0] + 600, y=box[1] + 40, by=-50)
    browser.do("until", script=f"Number(document.body.dataset.view.split(' ')[0]) > {whole[0]}")
    zoomed = view()
    assert whole[0] < zoomed[0] < zoomed[1] < whole[1]
    browser.do("drag", x=box[0] + 600, y=box[1] + 40, to=box[0] + 500)
    browser.do("until", script=f"Number(document.body.dataset.view.split(' ')[0]) > {zoomed[0]}")
    panned = view()
    assert panned[1] - panned[0] == pytest.approx(zoomed[1] - zoomed[0], rel=1e-3)
    browser.do("run", script="window.dispatchEvent(new KeyboardEvent('keydown', {key: '0'}))")
    browser.do("until", script=f"Number(document.body.dataset.view.split(' ')[0]) <= {whole[0]}")


def test_a_written_page_needs_no_server_and_no_network(browser: Browser, tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    command = [sys.executable, "-m", "rlhf_cli.main", "view", str(tmp_path / "run"), "--output", str(tmp_path / "page")]
    subprocess.run(command, check=True, timeout=300)
    before = browser.do("complaints")
    url = (tmp_path / "page" / "index.html").as_uri()
    browser.do("open", url=url)
    assert words(browser, "#name") == HOSTILE
    assert browser.do("run", script="document.querySelectorAll('img').length") == 0
    assert browser.do("run", script=f"({PAINTED})('workers')")[DECODE] > 1000
    after = browser.do("complaints")
    assert after["complaints"] == before["complaints"]
    assert [request for request in after["requests"] if request not in before["requests"]] == [url]


def test_what_slips_into_the_page_is_not_run(browser: Browser, shown: Any, tmp_path: Path) -> None:
    """Check the policy that would disarm a text even if it became markup."""
    write_run(tmp_path / "run", iterations=1)
    browser.do("open", url=shown(tmp_path / "run"))
    browser.do("run", script=SLIPPED)
    assert browser.do("run", script="window.ran === undefined")


def test_a_thousand_samples_on_sixty_four_workers_are_drawn_in_a_frame(
    browser: Browser, shown: Any, tmp_path: Path
) -> None:
    """Print the time of a frame without judging it, because it depends on the machine."""
    write_run(tmp_path / "run", iterations=6, samples=1000, generation=40, others=12)
    browser.do("open", url=shown(tmp_path / "run"))
    assert browser.do("run", script="document.getElementById('count').textContent") == "6 of 9 iterations, 5,052 spans"
    drew = browser.do("run", script=FRAMES)
    print(
        f"drawing took {drew[len(drew) // 2]:.1f} ms in the middle and {drew[-1]:.1f} ms at most of {len(drew)} frames"
    )
    assert len(drew) == 121
    browser.do("select", selector="#order", value="finished")
    assert browser.do("run", script=f"({PAINTED})('samples')")[MOVED] > 100
