"""Which rights a user of a test's API server makes use of, by the server's own audit log.

The rule: what RBAC was asked, not what somebody thinks is asked; a server-side apply that creates needs the right to.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

CREATED = 201
FORBIDDEN = 403


@dataclass(frozen=True)
class Audit:
    """The audit log of one API server, which is given `arguments`."""

    folder: Path

    @property
    def arguments(self) -> list[str]:
        """Flags of kube-apiserver; writes the policy that one of them names."""
        policy = {
            "apiVersion": "audit.k8s.io/v1",
            "kind": "Policy",
            "omitStages": ["RequestReceived"],
            "rules": [{"level": "Metadata"}],
        }
        (self.folder / "policy.json").write_text(json.dumps(policy))
        return [f"--audit-policy-file={self.folder / 'policy.json'}", f"--audit-log-path={self._log}"]

    def used(self, user: str) -> set[tuple[str, str, str]]:
        """(group, resource, verb) of all requests of a user so far that were not forbidden."""
        result = set()
        written, _, _ = self._log.read_text().rpartition("\n")  # the server may be in the middle of the line after
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
