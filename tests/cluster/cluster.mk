# A real Kubernetes cluster on this machine; tests/cluster/README.md says what it needs.
CLUSTER ?= --level node

.PHONY: cluster cluster-prepare cluster-clean

## A cluster that stays up until Ctrl-C and prints its KUBECONFIG (CLUSTER="--level control-plane --kwok-nodes 100").
cluster: env
	@cd tests && exec $(CURDIR)/$(BIN)/python -m cluster $(CLUSTER)

## Build the cluster's binaries and images into ~/.cache, so that no test waits for a compiler.
cluster-prepare: go
	@$(READY) $(if $(filter 0,$(shell id -u)),nodes,binaries)
	@cd tests && exec $(CURDIR)/$(BIN)/python -m cluster --prepare

## Remove what a killed run left; every start does the same.
cluster-clean: env
	@cd tests && exec $(CURDIR)/$(BIN)/python -m cluster --clean
