"""Rules that cross fields, once, as data: the CEL text for the API server and the check for `rlhf validate`.

Here is every statement about more than one field of an RLHFJob, and about what may change in a live one. What a single
field may hold is in the models instead.

A rule is one value (`rule.Rule`): the field to blame, CEL, the same check in Python, and the message. The definition
and the command line both read it, and a test runs both over the same manifests. To add a rule, add a `Rule` to the
module of its subject (`placement`, `paths`, `reward`, `failure`; else `table`), and its rows to
tests/support/manifests/manifest_tables/. `common_rules` has rules that occur often, `advice` the warnings, which CEL
does not have, `beyond_cel` the rules that Python alone judges (addresses, user code, sizes), and `unavailable` the
values that this version cannot do yet. No rule touches files.
"""
