# The operator alone: kopf, the Kubernetes client and certificates; no torch, no planner, no compiler, nothing run by root.
#
# BASE: any Linux with glibc and `python3` of 3.11 or later. UV: an image with the binary /uv.
# The dependencies are those of uv.lock, by hash; a lock that does not fit pyproject.toml ends the build.
# Without configuration: the overrides of pyproject.toml are for making the lock, and would unpin what it pins.
ARG BASE=docker.io/library/python:3.11-slim-bookworm
ARG UV=ghcr.io/astral-sh/uv:0.13.9

FROM ${UV} AS uv

FROM ${BASE} AS build
USER 0
COPY --from=uv /uv /usr/local/bin/uv
# The trust store of BASE, so that a company's own authority is known.
ENV UV_SYSTEM_CERTS=1 UV_PYTHON_DOWNLOADS=never UV_LINK_MODE=copy VIRTUAL_ENV=/opt/rlhf
WORKDIR /source
COPY pyproject.toml uv.lock ./
RUN uv export --locked --extra operator --no-emit-project --no-annotate --quiet --output-file=/tmp/requirements.txt \
    && uv venv --python="$(command -v python3)" "$VIRTUAL_ENV" \
    && uv pip install --no-config --no-deps --require-hashes --requirements=/tmp/requirements.txt \
    && find "$VIRTUAL_ENV" -type d -name tests -prune -exec rm -rf {} +
COPY README.md LICENSE ./
COPY common common
COPY api api
COPY planner planner
COPY coordinator coordinator
COPY operator operator
COPY cli cli
COPY workers workers
# Imported once, which leaves the bytecode of what is used: the root file system of a pod is read-only, and every start
# would compile it again.
RUN uv pip install --no-deps . \
    && cd "$VIRTUAL_ENV"/lib/python3*/site-packages \
    && rm -r rlhf_cli rlhf_coordinator rlhf_planner rlhf_workers "$VIRTUAL_ENV/bin/rlhf" "$VIRTUAL_ENV/bin/kubectl-rlhf" \
    && PYTHONDONTWRITEBYTECODE= "$VIRTUAL_ENV/bin/python" -c "import rlhf_operator.__main__"

FROM ${BASE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="rlhf-operator" \
      org.opencontainers.image.description="Kubernetes operator for RLHF" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /opt/rlhf /opt/rlhf
# /tmp is all that is written to.
# LOGNAME: libraries ask for the user's name, and the user of a pod may have none.
ENV PATH=/opt/rlhf/bin:/usr/local/bin:/usr/bin:/bin HOME=/tmp LOGNAME=rlhf \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /
USER 10001:10001
ENTRYPOINT ["python", "-m", "rlhf_operator"]
