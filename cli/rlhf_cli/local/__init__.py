"""Jobs as processes on this machine, from the same manifests as in a cluster."""
