"""Parts of benchmarks/operator_scale.py: a bare client, the jobs, the cluster with the operator, the scenarios."""
