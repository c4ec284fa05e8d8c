# The three images of the project; docs/operations.md says how they are used.
IMAGE_TOOL ?= $(firstword $(foreach tool,buildah podman docker,$(if $(shell command -v $(tool) 2>/dev/null),$(tool))))
IMAGE_REGISTRY ?= ghcr.io
IMAGE_VERSION ?= $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
# More build arguments, such as "--build-arg=BASE=... --build-arg=TORCH=base".
IMAGE_ARGUMENTS ?=

.PHONY: images images-push operator-image coordinator-image worker-image

## Build rlhf-operator/{operator,coordinator,worker} with buildah, podman or docker.
images: operator-image coordinator-image worker-image

operator-image coordinator-image worker-image: %-image:
	@test -n "$(IMAGE_TOOL)" || { echo "make images: none of buildah, podman, docker is installed" >&2; exit 1; }
	$(IMAGE_TOOL) build --file=images/$*.Dockerfile --tag=$(IMAGE_REGISTRY)/rlhf-operator/$*:$(IMAGE_VERSION) \
		--build-arg=VERSION=$(IMAGE_VERSION) --build-arg=REVISION=$$(git rev-parse HEAD 2>/dev/null || echo unknown) \
		$(IMAGE_ARGUMENTS) .

## Push them to IMAGE_REGISTRY.
images-push: images
	$(IMAGE_TOOL) push $(IMAGE_REGISTRY)/rlhf-operator/operator:$(IMAGE_VERSION)
	$(IMAGE_TOOL) push $(IMAGE_REGISTRY)/rlhf-operator/coordinator:$(IMAGE_VERSION)
	$(IMAGE_TOOL) push $(IMAGE_REGISTRY)/rlhf-operator/worker:$(IMAGE_VERSION)
