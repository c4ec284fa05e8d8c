"""The rights that a user of a test's API server uses, from the server's audit log.

Rule: it reports the questions that RBAC was asked, rather than assumed ones. A server-side apply that creates an object
needs the right to create.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

CREATED = 201
FORBIDDEN = 403


@dataclass(frozen=True)
class Audit:
    """The audit log of one API server, which is started with `arguments`."""

    folder: Path

    @property
    def arguments(self) -> list[str]:
        """Return flags of kube-apiserver; write the policy that one of them names."""
        policy = {
            "apiVersion": "audit.k8s.io/v1",
            "kind": "Policy",
            "omitStages": ["RequestReceived"],
            "rules": [{"level": "Metadata"}],
        }
        (self.folder / "policy.json").write_text(json.dumps(policy))
        return [f"--audit-policy-file={self.folder / 'policy.json'}", f"--audit-log-path={self._log}"]

    def used(self, user: str) -> set[tuple[str, str, str]]:
        """Return (group, resource, verb) of a user's requests for resources so far that were not forbidden."""
        result = set()
        written, _, _ = self._log.read_text().rpartition("\n")  # the server may be writing the last line
        for line in written.splitlines():
            entry = json.loads(line)
            about, code = entry.get("objectRef") or {}, entry.get("responseStatus", {}).get("code")
            if entry["user"].get("username") != user or not about or code == FORBIDDEN:
                continue
            resource = "/".join(part for part in (about["resource"], about.get("subresource")) if part)
            result.add((about.get("apiGroup", ""), resource, entry["verb"]))
            if entry["verb"] == "patch" and code == CREATED:
                result.add((about.get("apiGroup", ""), resource, "create"))
        return result

    @property
    def _log(self) -> Path:
        return self.folder / "audit.log"
