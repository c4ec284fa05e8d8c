"""From flags and kubeconfig to an API server and a namespace, by the rules of kubectl.

Order: --kubeconfig, KUBECONFIG (several files, joined by `:`), ~/.kube/config, the service account of a pod. Rule: a
kubeconfig is only ever read. Every way in which it can be unusable ends in one sentence.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml
from kubernetes.aio import config
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config.kube_config import KubeConfigLoader, KubeConfigMerger

from rlhf_api.names import ExitCode
from rlhf_cli.cluster.errors import VerbError

DEFAULT_NAMESPACE: Final = "default"
_HOME_FILE: Final = "~/.kube/config"
_POD_NAMESPACE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True)
class Connection:
    """Where requests go."""

    configuration: Configuration
    context: str
    """Name of the context; empty inside a pod."""
    user: str
    """Name of the kubeconfig's user entry; empty inside a pod."""
    namespace: str
    """The one meant when no other is named."""


async def connect(kubeconfig: Path | None, context: str | None) -> Connection:
    """Reads the kubeconfig. Raises VerbError."""
    paths = str(kubeconfig) if kubeconfig else os.environ.get("KUBECONFIG") or _HOME_FILE
    present = _present(paths)
    if not present:
        if kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ:
            return _inside_a_pod()
        raise VerbError(_no_file(kubeconfig, os.environ), ExitCode.USAGE)
    found = Configuration()
    try:
        merged = KubeConfigMerger(os.pathsep.join(present)).config
        if not context and not merged.safe_get("current-context"):
            raise VerbError(_no_context(_contexts(merged)), ExitCode.USAGE)
        if context and context not in _contexts(merged):
            named = f"the context {context!r} is not in {paths}"
            raise VerbError(f"{named}; it has {_listed(_contexts(merged))}", ExitCode.USAGE)
        loader = KubeConfigLoader(config_dict=merged, config_base_path=None, active_context=context or None)
        await loader.load_and_set(found)
    except (config.ConfigException, yaml.YAMLError, OSError) as error:
        raise VerbError(f"the kubeconfig {paths} cannot be used: {_line(error)}", ExitCode.USAGE) from error
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        told = f"the kubeconfig {paths} is no kubeconfig; `kubectl config view` shows what kubectl makes of it"
        raise VerbError(told, ExitCode.USAGE) from error
    chosen = loader.current_context
    return Connection(
        configuration=found,
        context=str(chosen["name"]),
        user=str(chosen["context"].get("user") or ""),
        namespace=str(chosen["context"].get("namespace") or DEFAULT_NAMESPACE),
    )


def _present(paths: str) -> list[str]:
    return [each for each in paths.split(os.pathsep) if each and Path(each).expanduser().is_file()]


def _inside_a_pod() -> Connection:
    found = Configuration()
    try:
        config.load_incluster_config(client_configuration=found)
    except config.ConfigException as error:
        raise VerbError(f"this pod has no service account to use: {error}", ExitCode.USAGE) from error
    namespace = _POD_NAMESPACE.read_text().strip() if _POD_NAMESPACE.is_file() else DEFAULT_NAMESPACE
    return Connection(found, "", "", namespace)


def _no_file(kubeconfig: Path | None, environment: Mapping[str, str]) -> str:
    if kubeconfig is not None:
        return f"--kubeconfig {kubeconfig}: there is no such file"
    if environment.get("KUBECONFIG"):
        return f"no kubeconfig: KUBECONFIG names {environment['KUBECONFIG']}, and there is no such file"
    return f"no kubeconfig: give --kubeconfig FILE, set KUBECONFIG, or write {_HOME_FILE}"


def _no_context(contexts: list[str]) -> str:
    return f"the kubeconfig names no current context: give --context, one of {_listed(contexts)}"


def _contexts(merged: object) -> list[str]:
    value = getattr(merged, "value", None) or {}
    return [str(each.value["name"]) for each in value.get("contexts") or []]


def _listed(names: list[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
