"""Waits until the API server serves RLHFJobs, and says why it does not.

Rule: a missing definition never ends the operator.
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
"""Seconds until the second request; each following delay is twice as long, up to RETRY_SECONDS."""
RETRY_SECONDS: Final = 15.0
"""Longest delay in seconds between two requests."""
INSTALL: Final = f"kubectl apply --server-side -f crds/{names.PLURAL}.yaml"
"""Command that installs the definition or upgrades it to the operator's version."""


class Definition:
    """The definition of RLHFJobs in the cluster."""

    def __init__(self, client: KubernetesClient, namespaces: Sequence[str]) -> None:
        """`namespaces`: `served` lists RLHFJobs in the first; if empty, in all."""
        self._client, self._namespace = client, namespaces[0] if namespaces else None
        self.problem = ""
        """Reason why RLHFJobs cannot be listed, while `served` waits; else empty."""

    async def served(self) -> None:
        """Wait until the API server serves RLHFJobs."""
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
