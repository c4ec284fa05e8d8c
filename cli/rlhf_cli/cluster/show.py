"""`rlhf get`: reads jobs and prints them, once or as they change."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from rich.console import Group
from rich.live import Live
from rich.text import Text

from rlhf_api import names
from rlhf_cli.cluster import listing
from rlhf_cli.cluster.follow import follow
from rlhf_cli.cluster.session import Session, now
from rlhf_cli.cluster.stored import Stored

Json = dict[str, Any]


@dataclass(frozen=True)
class Shown:
    """Arguments of `rlhf get`."""

    jobs: tuple[str, ...] = ()
    every_namespace: bool = False
    selector: str = ""
    form: str = ""
    """"", wide, name, json, yaml."""
    watch: bool = False


async def get(session: Session, asked: Shown) -> int:
    """Prints the table, or the objects."""
    if asked.watch:
        return await _watch(session, asked)
    if asked.jobs:
        bodies = [dict((await session.job(name)).body) for name in asked.jobs]
    else:
        bodies, _ = await session.api.listing(names.PLURAL, _namespace(session, asked), **_selectors(asked))
    if asked.form in ("json", "yaml"):
        single = len(asked.jobs) == 1
        session.out.file.write(document(bodies[0] if single else _list(bodies), asked.form))
        return 0
    jobs = [Stored(each) for each in bodies]
    if asked.form == "name":
        session.write(f"{names.SINGULAR}.{names.GROUP}/{job.name}" for job in jobs)
        return 0
    lines = _table(session, asked, jobs)
    session.write(lines)
    if not lines:
        session.note(_nothing(session, asked))
    return 0


def document(body: Json, form: str) -> str:
    """As kubectl prints it, without the managed fields."""
    if form == "json":
        return json.dumps(_plain(body), indent=4, ensure_ascii=False) + "\n"
    return yaml.safe_dump(_plain(body), sort_keys=False, allow_unicode=True, width=120)


async def _watch(session: Session, asked: Shown) -> int:
    """A table that is always up to date; in a pipe, a line for every change."""
    selectors = _selectors(asked)
    if len(asked.jobs) == 1:
        await session.job(asked.jobs[0])
        selectors["fieldSelector"] = f"metadata.name={asked.jobs[0]}"
    changes = follow(session.api, names.PLURAL, _namespace(session, asked), session.note, **selectors)
    if session.live and asked.form in ("", "wide"):
        with Live(console=session.out, auto_refresh=False, vertical_overflow="crop") as live:
            async for objects in changes:
                jobs = [Stored(body) for (_, name), body in sorted(objects.items()) if _wanted(name, asked)]
                lines = _table(session, asked, jobs) or [Text(_nothing(session, asked), style="dim")]
                live.update(Group(*lines), refresh=True)
        return 0
    seen: dict[tuple[str, str], str] = {}
    heading = True
    async for objects in changes:
        wanted = [(key, body) for key, body in sorted(objects.items()) if _wanted(key[1], asked)]
        # Made of all, so that columns stay where they are from change to change.
        lines = _table(session, asked, [Stored(body) for _, body in wanted])
        for number, (key, body) in enumerate(wanted):
            version = str(body["metadata"]["resourceVersion"])
            if seen.get(key) != version:
                named = f"{names.SINGULAR}.{names.GROUP}/{key[1]}"
                rows = [*(lines[:1] if heading else []), lines[number + 1]]
                session.write(_single(asked, body) or ([named] if asked.form == "name" else rows))
                heading, seen[key] = False, version
    return 0


def _single(asked: Shown, body: Json) -> list[str]:
    """One object of a stream of them; nothing for a table."""
    if asked.form not in ("json", "yaml"):
        return []
    return [("---\n" if asked.form == "yaml" else "") + document(body, asked.form).rstrip("\n")]


def _table(session: Session, asked: Shown, jobs: Sequence[Stored]) -> list[Text]:
    wide = asked.form == "wide"
    return listing.table(jobs, now(), session.width, namespaces=asked.every_namespace, wide=wide)


def _wanted(name: str, asked: Shown) -> bool:
    return not asked.jobs or name in asked.jobs


def _namespace(session: Session, asked: Shown) -> str | None:
    return None if asked.every_namespace else session.namespace


def _selectors(asked: Shown) -> dict[str, str]:
    return {"labelSelector": asked.selector} if asked.selector else {}


def _nothing(session: Session, asked: Shown) -> str:
    if asked.every_namespace:
        return "no RLHFJob in any namespace"
    return f"no RLHFJob in namespace {session.namespace}; -A looks in all"


def _list(bodies: list[Json]) -> Json:
    return {"apiVersion": "v1", "kind": "List", "items": bodies}


def _plain(body: Json) -> Json:
    if body.get("kind") == "List":
        return body | {"items": [_plain(each) for each in body["items"]]}
    return body | {"metadata": {key: value for key, value in body["metadata"].items() if key != "managedFields"}}
