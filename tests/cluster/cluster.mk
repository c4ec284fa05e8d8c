# A real Kubernetes cluster on this machine; tests/cluster/README.md says what it needs.
CLUSTER ?= --level node

.PHONY: cluster cluster-prepare cluster-clean observe observe-pictures

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

## A cluster with dashboards, Prometheus, Alertmanager and a job that trains, until Ctrl-C; prints where to look.
observe: cluster-prepare
	@exec $(BIN)/python -m tests.cluster.monitored.observe

## The same, which ends when the job has trained a while, and leaves docs/pictures/dashboards.
observe-pictures: cluster-prepare
	@exec $(BIN)/python -m tests.cluster.monitored.observe --interval 2s --pictures docs/pictures/dashboards
