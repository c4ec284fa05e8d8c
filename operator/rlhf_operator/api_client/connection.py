"""Finds the API server and the credentials, from a kubeconfig or the pod's service account.

Order: the named kubeconfig, then KUBECONFIG (files joined by `:`), then ~/.kube/config and the pod's service account,
or the reverse with `prefer_pod`.
"""

import os
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from kubernetes.aio import config
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config.kube_config import KubeConfigLoader, KubeConfigMerger

DEFAULT_NAMESPACE: Final = "default"
_HOME_FILE: Final = "~/.kube/config"
_POD_NAMESPACE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class ConnectionConfigError(Exception):
    """There is no usable configuration of an API server; the message gives the reason."""


@dataclass(frozen=True)
class Connection:
    """The target of requests."""

    configuration: Configuration
    context: str = ""
    """Name of the kubeconfig's context; empty with a pod's service account."""
    user: str = ""
    """Name of the kubeconfig's user entry; empty with a pod's service account, or if the context names none."""
    namespace: str = DEFAULT_NAMESPACE
    """Namespace to use when none is named."""


async def find_connection(
    kubeconfig: Path | None = None, context: str | None = None, *, prefer_pod: bool = False
) -> Connection:
    """Return the connection to the API server. `prefer_pod`: whether a pod's service account precedes ~/.kube/config.

    Raises ConnectionConfigError.
    """
    in_pod = kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ
    if in_pod and prefer_pod and "KUBECONFIG" not in os.environ:
        return _pod_connection()
    paths = str(kubeconfig) if kubeconfig else os.environ.get("KUBECONFIG") or _HOME_FILE
    present = _present(paths)
    if present:
        return await _kubeconfig_connection(paths, present, context)
    if in_pod:
        return _pod_connection()
    raise ConnectionConfigError(_no_file(kubeconfig, os.environ))


def session_options() -> dict[str, Any]:
    """Return options of the HTTP client, which reads the environment only if that names a proxy."""
    return {"trust_env": bool(urllib.request.getproxies_environment())}


async def _kubeconfig_connection(paths: str, present: list[str], context: str | None) -> Connection:
    configuration = Configuration()
    try:
        merged = KubeConfigMerger(os.pathsep.join(present)).config
        if not context and not merged.safe_get("current-context"):
            contexts = _joined(_contexts(merged))
            raise ConnectionConfigError(f"the kubeconfig names no current context: give --context, one of {contexts}")
        if context and context not in _contexts(merged):
            contexts = _joined(_contexts(merged))
            raise ConnectionConfigError(f"the context {context!r} is not in {paths}; it has {contexts}")
        loader = KubeConfigLoader(config_dict=merged, config_base_path=None, active_context=context or None)
        await loader.load_and_set(configuration)
    except (config.ConfigException, yaml.YAMLError, OSError) as error:
        raise ConnectionConfigError(f"the kubeconfig {paths} cannot be used: {_line(error)}") from error
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        message = f"the kubeconfig {paths} is no kubeconfig; `kubectl config view` shows what kubectl makes of it"
        raise ConnectionConfigError(message) from error
    chosen = loader.current_context
    return Connection(
        configuration=configuration,
        context=str(chosen["name"]),
        user=str(chosen["context"].get("user") or ""),
        namespace=str(chosen["context"].get("namespace") or DEFAULT_NAMESPACE),
    )


def _present(paths: str) -> list[str]:
    return [path for path in paths.split(os.pathsep) if path and Path(path).expanduser().is_file()]


def _pod_connection() -> Connection:
    configuration = Configuration()
    try:
        config.load_incluster_config(client_configuration=configuration)
    except config.ConfigException as error:
        raise ConnectionConfigError(f"this pod has no service account to use: {error}") from error
    namespace = _POD_NAMESPACE.read_text().strip() if _POD_NAMESPACE.is_file() else DEFAULT_NAMESPACE
    return Connection(configuration, namespace=namespace)


def _no_file(kubeconfig: Path | None, environment: Mapping[str, str]) -> str:
    if kubeconfig is not None:
        return f"--kubeconfig {kubeconfig}: {'is a folder' if kubeconfig.is_dir() else 'there is no such file'}"
    if environment.get("KUBECONFIG"):
        return f"no kubeconfig: KUBECONFIG names {environment['KUBECONFIG']}, and there is no such file"
    return f"no kubeconfig: give --kubeconfig FILE, set KUBECONFIG, or write {_HOME_FILE}"


def _contexts(merged: object) -> list[str]:
    value = getattr(merged, "value", None) or {}
    return [str(context.value["name"]) for context in value.get("contexts") or []]


def _joined(contexts: list[str]) -> str:
    return ", ".join(sorted(contexts)) or "none"


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
