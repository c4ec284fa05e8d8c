"""Client of the Kubernetes API, used by the operator and the command line.

Must never import kopf or another module of the operator.
"""
