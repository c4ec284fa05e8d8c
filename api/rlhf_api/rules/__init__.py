"""Rules across fields as data: the CEL text for the API server and the check for `rlhf validate`.

To add one, add a `rule.Rule` to the module of its subject, such as `placement`, or else to `table`, and its rows to
tests/support/manifests/manifest_tables/. `advice` has warnings, `beyond_cel` has rules in Python only, and
`unavailable` has values that this version does not support.
"""
