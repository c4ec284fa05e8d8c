"""The same manifests as a cluster gets, run as processes on this machine."""
