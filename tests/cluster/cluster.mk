# A real Kubernetes cluster on this machine, up until Ctrl-C. Arguments: make cluster CLUSTER="--level control-plane --kwok-nodes 100".
CLUSTER ?= --level node
CLUSTER_PYTHON ?= $(CURDIR)/.venv/bin/python

.PHONY: cluster cluster-binaries cluster-clean

cluster:
	@cd tests && exec $(CLUSTER_PYTHON) -m cluster $(CLUSTER)

# Builds the binaries into the cache, so that the first test does not wait for it.
cluster-binaries:
	@cd tests && exec $(CLUSTER_PYTHON) -m cluster.toolchain

# Removes what a killed run left; every start does the same.
cluster-clean:
	@cd tests && exec $(CLUSTER_PYTHON) -m cluster --clean
