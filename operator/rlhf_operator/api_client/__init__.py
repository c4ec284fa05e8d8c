"""Client of the Kubernetes API, used by the operator and the command line.

Modules from the lowest layer: `resources` gives the path of each kind, `errors` the failures, `connection` finds the
API server, `transport` sends requests and reads streams, `client` reads and writes objects, `reflector` lists and
watches.

Rule: imports neither kopf nor another module of the operator.
"""
