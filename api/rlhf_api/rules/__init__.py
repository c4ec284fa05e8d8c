"""Rules across fields as data: the CEL text for the API server and the check for `rlhf validate`.

A rule is one value (`rule.Rule`): the field to blame, CEL, the same check in Python, and the message. To add one, add a
`Rule` to the module of its subject, such as `placement`, or else to `table`, and its rows to
tests/support/manifests/manifest_tables/. An algorithm's own rules are in its module of `rlhf_api.algorithms`.

`common_rules` has kinds of rules that occur often; `advice` has warnings, which CEL does not support; `beyond_cel` has
rules in Python only; `unavailable` has values that this version does not support.
"""
