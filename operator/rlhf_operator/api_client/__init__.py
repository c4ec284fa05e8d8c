"""The one client of the Kubernetes API, of the operator and of the command line.

From the bottom: `resources` says where a kind is served, `errors` what can go wrong, `connection` finds the API server,
`transport` sends requests and reads streams, `client` reads and writes objects, `reflector` lists and watches.

Rule: knows neither RLHF jobs' rules nor kopf, decides nothing, and imports nothing of the operator.
"""
