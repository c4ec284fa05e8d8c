"""Whether the API server serves RLHFJobs: waits while it does not, and says so to the readiness probe.

Rule: a definition that is missing ends nothing. The operator may be started before it is installed, and goes on when
it was deleted and is there again; meanwhile one request is sent per RETRY_SECONDS at most, and a line is logged when
something changes.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from rlhf_common import names
from rlhf_operator.api_client.client import KubernetesClient
from rlhf_operator.api_client.errors import ApiError, MissingError

log = logging.getLogger(__name__)

FIRST_RETRY_SECONDS: Final = 1.0
"""Until the second request; each following delay is twice as long."""
RETRY_SECONDS: Final = 15.0
"""Longest delay between two requests: an administrator who has installed the definition waits for us."""
INSTALL: Final = f"kubectl apply --server-side -f crds/{names.PLURAL}.yaml"
"""Command that installs the definition, or brings it up to the operator's version."""


class Definition:
    """The definition of RLHFJobs in the cluster."""

    def __init__(self, client: KubernetesClient, namespaces: Sequence[str]) -> None:
        """RLHFJobs are looked for in the first namespace; in all of them when none is named."""
        self._client, self._namespace = client, namespaces[0] if namespaces else None
        self.problem = ""
        """Why no RLHFJob can be read; empty: they can, as far as is known."""

    async def served(self) -> None:
        """Return when the API server serves RLHFJobs."""
        delay = FIRST_RETRY_SECONDS
        while problem := await self._problem():
            if problem != self.problem:
                log.warning("%s", problem)
            self.problem = problem
            await asyncio.sleep(delay)
            delay = min(2 * delay, RETRY_SECONDS)
        if self.problem:
            log.info("RLHFJobs are served")
        self.problem = ""

    async def _problem(self) -> str:
        try:
            async for _ in self._client.metadata(names.KIND, self._namespace):
                break
        except MissingError:
            return f"{names.PLURAL}.{names.GROUP} is not installed: the operator waits for it ({INSTALL})"
        except ApiError as error:
            return f"RLHFJobs cannot be listed: {error}"
        return ""
