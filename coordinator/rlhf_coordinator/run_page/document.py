"""The page as one file: markup, style and program, with a policy that blocks other code, and fetches from elsewhere.

Content of a run is data: `embedded` escapes every `<`.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Final

PROGRAM: Final = ("store.js", "axis.js", "timeline.js", "samples.js", "schedule.js", "lists.js", "main.js")
"""Parts of the program, in order."""


@cache
def page(deltas: str = "") -> bytes:
    """Return the page. `deltas`: output of `embedded`; without it, the page requests deltas from its server."""
    style = _part("style.css")
    markup = _part("page.html")
    for place, content in (
        ("STYLE", style),
        ("POLICY", policy(live=not deltas)),
        ("PROGRAM", _program()),
        ("DATA", deltas),
    ):
        markup = markup.replace(f"%{place}%", content)  # the data last, so that it is not searched for places
    return markup.encode()


def policy(*, live: bool) -> str:
    """Return the Content-Security-Policy of the page. `live`: whether it may connect to its own server."""
    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src '{_sum(_program())}'; style-src '{_sum(_part('style.css'))}'; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def embedded(deltas: Sequence[dict[str, Any]]) -> str:
    """Return deltas as JSON without the characters `<`, `>` and `&`. Raises ValueError as `plain_json` does."""
    return plain_json(deltas).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def plain_json(value: Any) -> str:
    """Return ASCII JSON. Raises ValueError for a number that JSON lacks."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


@cache
def _program() -> str:
    return "'use strict';\n(() => {\n" + "\n".join(map(_part, PROGRAM)) + "\n})();\n"


@cache
def _part(name: str) -> str:
    return (files("rlhf_coordinator.run_page") / "page" / name).read_text(encoding="utf-8")


def _sum(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
