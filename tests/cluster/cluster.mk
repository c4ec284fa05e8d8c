# A real Kubernetes cluster on this machine; tests/cluster/README.md says what it needs.
CLUSTER ?= --level node

.PHONY: cluster cluster-prepare cluster-clean

## A cluster that stays up until Ctrl-C and prints its KUBECONFIG (CLUSTER="--level control-plane --kwok-nodes 100").
cluster: env
	@exec $(BIN)/python -m tests.cluster $(CLUSTER)

## Build the cluster's binaries and images into ~/.cache, so that no test waits for a compiler.
cluster-prepare: go
	@$(READY) $(if $(filter 0,$(shell id -u)),nodes,binaries)
	@exec $(BIN)/python -m tests.cluster --prepare

## Remove what a killed run left; every start does the same.
cluster-clean: env
	@exec $(BIN)/python -m tests.cluster --clean
