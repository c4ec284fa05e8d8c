"""Log lines of a reconcile name the job automatically; those of other tasks do not."""

import asyncio
import io
import json
import logging
from typing import Any

from rlhf_operator import operator_logs


async def test_lines_of_a_reconcile_name_its_job_and_no_other() -> None:
    stream, both = io.StringIO(), asyncio.Barrier(2)
    handler, log = logging.StreamHandler(stream), logging.getLogger("test of lines")
    handler.setFormatter(operator_logs.json_formatter())
    log.addHandler(handler)
    log.setLevel(logging.INFO)

    async def reconcile(key: str, job: dict[str, Any]) -> None:
        with operator_logs.reconciling(key, job):
            async with asyncio.timeout(60):
                await both.wait()
            log.info("in %s", key)
            log.info("in %s of another", key, extra={"job": "team/other"})
        log.info("after %s", key)

    await asyncio.gather(
        reconcile("team/a", {"status": {"progress": {"iteration": 4}}}),
        reconcile("team/b", {"status": {"progress": "odd"}}),
    )
    lines = {line["message"]: line for line in map(json.loads, stream.getvalue().splitlines())}
    assert (lines["in team/a"]["job"], lines["in team/a"]["iteration"]) == ("team/a", 4)
    assert lines["in team/b"]["job"] == "team/b"
    assert "iteration" not in lines["in team/b"]
    assert lines["in team/a of another"]["job"] == "team/other"
    assert "job" not in lines["after team/a"]
