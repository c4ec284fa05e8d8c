"""Rules that cross fields, once, as data: the CEL text for the API server and the check for `rlhf validate`.

Owns every statement about more than one field of an RLHFJob and about what may change in a live one. The rule it
follows: a rule is one value with its field, CEL, Python check and words; the CRD and the command line both read it from
here, and a test runs both over the same manifests. What one field alone may hold is in the models instead.
What can be started but does not do what it says (`advice`) is a warning, which CEL has not.
Must never touch files or know which modes this version lacks (`rlhf_api.rules.unavailable`).
"""
