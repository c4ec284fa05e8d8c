"""Checks rules of the API server beyond the pod schema: names, labels, ports, mounts without volume, limits.

They predict a part of a dry run, so problems have `Severity.SERVER`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, Final

from rlhf_api.problems import Problem, Severity
from rlhf_common.kubernetes_names import label_problem, name_problem, qualified_problem
from rlhf_operator.manifests.quantity import amount

Json = Mapping[str, Any]

_PORT_NAME: Final = re.compile(r"(?=.*[a-z])[a-z0-9]+(-[a-z0-9]+)*")
_PORT_MAX: Final = 65535
_ANNOTATIONS_MAX: Final = 256 * 1024
"""Maximum bytes of all annotations of an object, names included."""
_PLAIN_RESOURCES: Final = frozenset({"cpu", "memory", "ephemeral-storage"})
"""Resources of containers without a domain; others are hugepages-<size> or have their vendor's domain."""
_REFERENCES: Final = ("serviceAccountName", "priorityClassName", "runtimeClassName", "schedulerName")


def problems_of(template: Json, path: str, own_container: str, own_volumes: Set[str]) -> Iterator[Problem]:
    """Yield problems that the API server would report about a pod of the template with our container and volumes."""
    for problem in _problems(template, path, own_container, own_volumes):
        yield Problem(problem.field, problem.value, problem.message, severity=Severity.SERVER)


def _problems(template: Json, path: str, own_container: str, own_volumes: Set[str]) -> Iterator[Problem]:
    yield from _metadata(template.get("metadata") or {}, f"{path}.metadata")
    spec, path = template.get("spec") or {}, f"{path}.spec"
    for field in _REFERENCES:
        if spec.get(field):
            yield from _said(f"{path}.{field}", spec[field], name_problem(spec[field]))
    for name, value in (spec.get("nodeSelector") or {}).items():
        yield from _label(f"{path}.nodeSelector", name, value)
    if (seconds := spec.get("activeDeadlineSeconds")) is not None and seconds < 1:
        yield Problem(f"{path}.activeDeadlineSeconds", seconds, "must be at least 1")
    for index, toleration in enumerate(spec.get("tolerations") or []):
        yield from _toleration(toleration, f"{path}.tolerations[{index}]")
    volumes = spec.get("volumes") or []
    yield from _volumes(volumes, f"{path}.volumes")
    mountable = own_volumes | {str(volume.get("name")) for volume in volumes}
    claims = spec.get("resourceClaims") or []
    yield from _claims(claims, f"{path}.resourceClaims")
    claimed = {str(claim.get("name")) for claim in claims}
    names: set[str] = set()
    for kind in ("initContainers", "containers"):
        for index, container in enumerate(spec.get(kind) or []):
            where, name = f"{path}.{kind}[{index}]", container.get("name")
            yield from _taken(f"{where}.name", name, names, "the name of a container")
            yield from _container(container, where, mountable, ours=kind == "containers" and name == own_container)
            for place, claim in enumerate((container.get("resources") or {}).get("claims") or []):
                if claim.get("name") not in claimed:
                    claim_names = ", ".join(sorted(claimed)) or "none"
                    message = f"no claim has this name: add it to spec.resourceClaims, or use one of {claim_names}"
                    yield Problem(f"{where}.resources.claims[{place}].name", claim.get("name"), message)


def _metadata(metadata: Json, path: str) -> Iterator[Problem]:
    for name, value in (metadata.get("labels") or {}).items():
        yield from _label(f"{path}.labels", name, value)
    annotations = metadata.get("annotations") or {}
    for name in annotations:
        yield from _said(f"{path}.annotations", name, qualified_problem(name.lower()))
    size = sum(len(name.encode()) + len(value.encode()) for name, value in annotations.items())
    if size > _ANNOTATIONS_MAX:
        yield Problem(f"{path}.annotations", None, f"are {size} bytes: must be at most {_ANNOTATIONS_MAX} together")


def _label(path: str, name: str, value: str) -> Iterator[Problem]:
    yield from _said(path, name, qualified_problem(name))
    yield from _said(f"{path}.{name}", value, label_problem(value))


def _toleration(toleration: Json, path: str) -> Iterator[Problem]:
    operator, key = toleration.get("operator") or "Equal", toleration.get("key")
    if key:
        yield from _said(f"{path}.key", key, qualified_problem(key))
    elif operator != "Exists":
        yield Problem(f"{path}.operator", operator, "must be Exists when there is no key, which tolerates every taint")
    if operator == "Exists" and toleration.get("value"):
        yield Problem(f"{path}.value", toleration["value"], "must be left out with operator Exists")
    if toleration.get("tolerationSeconds") is not None and toleration.get("effect") != "NoExecute":
        yield Problem(f"{path}.effect", toleration.get("effect"), "must be NoExecute with tolerationSeconds")


def _volumes(volumes: Sequence[Json], path: str) -> Iterator[Problem]:
    names: set[str] = set()
    for index, volume in enumerate(volumes):
        where = f"{path}[{index}]"
        yield from _taken(f"{where}.name", volume.get("name"), names, "the name of a volume")
        sources = [name for name, value in volume.items() if name != "name" and value is not None]
        if len(sources) != 1:
            present = " and ".join(sources) or "none"
            yield Problem(where, volume, f"needs exactly one source, such as persistentVolumeClaim, and has {present}")
        if volume.get("image") is not None and not volume["image"].get("reference"):
            yield Problem(f"{where}.image.reference", None, "is required: name an image, such as registry/model:v1")
        for source, field in (("configMap", "name"), ("secret", "secretName"), ("persistentVolumeClaim", "claimName")):
            if volume.get(source) is None:
                continue
            name = volume[source].get(field) or ""
            yield from _said(f"{where}.{source}.{field}", name, name_problem(name))


def _claims(claims: Sequence[Json], path: str) -> Iterator[Problem]:
    names: set[str] = set()
    for index, claim in enumerate(claims):
        where = f"{path}[{index}]"
        yield from _taken(f"{where}.name", claim.get("name"), names, "the name of a claim")
        sources = [name for name in ("resourceClaimName", "resourceClaimTemplateName") if claim.get(name)]
        if len(sources) != 1:
            message = "needs exactly one of resourceClaimName, resourceClaimTemplateName"
            yield Problem(where, claim, message)
        for name in sources:
            yield from _said(f"{where}.{name}", claim[name], name_problem(claim[name]))


def _container(container: Json, path: str, volumes: Set[str], *, ours: bool) -> Iterator[Problem]:
    image = container.get("image")
    if not ours and not image:
        yield Problem(f"{path}.image", image, "is required: only our own container has an image without a template")
    elif image and image.strip() != image:
        yield Problem(f"{path}.image", image, "must not begin or end with a blank")
    for index, variable in enumerate(container.get("env") or []):
        yield from _variable(variable, f"{path}.env[{index}]")
    port_names: set[str] = set()
    for index, port in enumerate(container.get("ports") or []):
        yield from _port(port, f"{path}.ports[{index}]", port_names)
    mounted: set[str] = set()
    for index, mount in enumerate(container.get("volumeMounts") or []):
        yield from _mount(mount, f"{path}.volumeMounts[{index}]", volumes, mounted)
    yield from _resources(container.get("resources") or {}, f"{path}.resources")


def _variable(variable: Json, path: str) -> Iterator[Problem]:
    name = str(variable.get("name") or "")
    if not name or "=" in name or not all(" " <= letter <= "~" for letter in name):
        yield Problem(f"{path}.name", name, "must be a name of printable ASCII characters without '='")
    source = variable.get("valueFrom")
    if source is not None and variable.get("value"):
        yield Problem(f"{path}.valueFrom", source, "must be left out beside value: use one of both")
    elif source is not None and sum(choice is not None for choice in source.values()) != 1:
        yield Problem(f"{path}.valueFrom", source, "needs exactly one source, such as secretKeyRef")


def _port(port: Json, path: str, names: set[str]) -> Iterator[Problem]:
    number, name = port.get("containerPort"), port.get("name")
    if number is not None and not 1 <= number <= _PORT_MAX:
        yield Problem(f"{path}.containerPort", number, f"must be from 1 to {_PORT_MAX}")
    if name:
        if len(name) > 15 or not _PORT_NAME.fullmatch(name):
            yield Problem(f"{path}.name", name, "must be at most 15 of a-z, 0-9 and '-', with a letter")
        yield from _duplicate(f"{path}.name", name, names, "the name of a port")


def _mount(mount: Json, path: str, volumes: Set[str], mounted: set[str]) -> Iterator[Problem]:
    name, place = str(mount.get("name") or ""), str(mount.get("mountPath") or "")
    if name not in volumes:
        volume_names = ", ".join(sorted(volumes)) or "none"
        yield Problem(
            f"{path}.name", name, f"no volume has this name: add it to spec.volumes, or use one of {volume_names}"
        )
    if not place or ":" in place:
        yield Problem(f"{path}.mountPath", place, "must be a path without ':'")
    yield from _duplicate(f"{path}.mountPath", place, mounted, "the path of a mount")
    for field in ("subPath", "subPathExpr"):
        below = mount.get(field) or ""
        if below.startswith("/") or ".." in below.split("/"):
            yield Problem(f"{path}.{field}", below, "must be a path within the volume, without '..'")


def _resources(resources: Json, path: str) -> Iterator[Problem]:
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    for kind, amounts in (("limits", limits), ("requests", requests)):
        for name, value in amounts.items():
            yield from _amount(f"{path}.{kind}.{name}", name, value)
    for name in limits.keys() & requests.keys():
        asked, limit = amount(requests[name]), amount(limits[name])
        if asked > limit:
            yield Problem(f"{path}.requests.{name}", requests[name], f"must be at most the limit, {limits[name]}")
        elif asked != limit and _is_extended(name):
            yield Problem(f"{path}.requests.{name}", requests[name], f"must be the limit, {limits[name]}")
    for name in requests.keys() - limits.keys():
        if _is_extended(name):
            yield Problem(f"{path}.limits.{name}", None, f"is required beside the request of {requests[name]}")


def _amount(path: str, name: str, value: object) -> Iterator[Problem]:
    if "/" in name:
        yield from _said(path, name, qualified_problem(name))
    elif name not in _PLAIN_RESOURCES and not name.startswith("hugepages-"):
        yield Problem(path, value, "is no resource of a container: use cpu, memory, or <vendor domain>/<name>")
    number = amount(value)
    if number < 0:
        yield Problem(path, value, "must not be negative")
    elif _is_extended(name) and number != int(number):
        yield Problem(path, value, "must be a whole number")


def _is_extended(name: str) -> bool:
    return "/" in name and "kubernetes.io/" not in name


def _taken(path: str, name: object, names: set[str], subject: str) -> Iterator[Problem]:
    """Yield the problems of a name that must be a DNS label and unique among its kind."""
    text = str(name or "")
    yield from _said(path, text, name_problem(text, label=True))
    yield from _duplicate(path, text, names, subject)


def _duplicate(path: str, name: str, names: set[str], subject: str) -> Iterator[Problem]:
    if name and name in names:
        yield Problem(path, name, f"is {subject} already: use another")
    names.add(name)


def _said(path: str, value: object, problem: str) -> Iterator[Problem]:
    if problem:
        yield Problem(path, value, problem)
