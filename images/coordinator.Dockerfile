# Coordinators of jobs: planner, tokenizers, parquet, TensorBoard's files; no torch, no kopf, no Kubernetes client,
# nothing run by root.
#
# BASE: any Linux with glibc and `python3` of 3.11 or later. UV: an image with the binary /uv.
# The dependencies are those of uv.lock, by hash; a lock that does not fit pyproject.toml ends the build.
# Without configuration: the overrides of pyproject.toml are for making the lock, and would unpin what it pins.
# TRACKERS: services of spec.trackers whose libraries are brought, such as "wandb mlflow"; none unless asked for.
ARG BASE=docker.io/library/python:3.11-slim-bookworm
ARG UV=ghcr.io/astral-sh/uv:0.13.9

FROM ${UV} AS uv

FROM ${BASE} AS build
ARG TRACKERS=""
USER 0
COPY --from=uv /uv /usr/local/bin/uv
# The trust store of BASE, so that a company's own authority is known.
ENV UV_SYSTEM_CERTS=1 UV_PYTHON_DOWNLOADS=never UV_LINK_MODE=copy VIRTUAL_ENV=/opt/rlhf
WORKDIR /source
COPY pyproject.toml uv.lock ./
# Left out: what shows TensorBoard's pages, as the coordinator only writes its files.
RUN extras="" \
    && for tracker in $TRACKERS; do \
        case "$tracker" in \
            wandb|mlflow) extras="$extras --extra=$tracker" ;; \
            *) echo "TRACKERS: $tracker: must be wandb or mlflow" >&2; exit 2 ;; \
        esac; \
    done \
    && uv export --locked --extra coordinator --extra data $extras --no-emit-project --no-annotate --quiet --output-file=/tmp/requirements.txt \
        --prune=pillow --prune=tensorboard-data-server \
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
    && rm -r rlhf_cli rlhf_operator rlhf_workers "$VIRTUAL_ENV/bin/rlhf" "$VIRTUAL_ENV/bin/kubectl-rlhf" \
    && PYTHONDONTWRITEBYTECODE= "$VIRTUAL_ENV/bin/python" -c "import rlhf_coordinator.__main__, \
        rlhf_coordinator.training.schedule_search, ortools.sat.python.cp_model, \
        rlhf_coordinator.reports.trackers.tensorboard_events, tensorboard.summary.writer.record_writer; from transformers import AutoTokenizer; import pyarrow.parquet" \
    && for tracker in $TRACKERS; do PYTHONDONTWRITEBYTECODE= "$VIRTUAL_ENV/bin/python" -c "import $tracker" || exit 1; done

FROM ${BASE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="rlhf-coordinator" \
      org.opencontainers.image.description="Coordinators of RLHFJobs: the control plane of one job" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /opt/rlhf /opt/rlhf
# /tmp is all that is written to, beside the volumes of a job.
# LOGNAME: libraries ask for the user's name, and the user of a pod may have none.
ENV PATH=/opt/rlhf/bin:/usr/local/bin:/usr/bin:/bin HOME=/tmp LOGNAME=rlhf \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /
USER 10001:10001
ENTRYPOINT ["python", "-m", "rlhf_coordinator"]
