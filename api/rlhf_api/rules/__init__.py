"""Rules across fields as data: the CEL text for the API server and the check for `rlhf validate`.

This package has statements about an RLHFJob that a field's type cannot express, and about changes of a live job. An
algorithm's own rules are in its module of `rlhf_api.algorithms`; `table` lists them too.

A rule is one value (`rule.Rule`): the field to blame, CEL, the same check in Python, and the message. To add a rule,
add a `Rule` to the module of its subject, such as `placement`, or else to `table`, and its rows to
tests/support/manifests/manifest_tables/. `common_rules` has kinds of rules that occur often; `advice` has the warnings,
which CEL does not support; `beyond_cel` has rules in Python only (user code, addresses, sizes, devices); `unavailable`
has values that this version does not support. No rule accesses files.
"""
