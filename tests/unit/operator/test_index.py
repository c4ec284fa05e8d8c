"""The index has the newest object for any order of events."""

from typing import Any

import pytest
from tests.support.operator.indexed_bodies import KEY, job, other, phase, pod

from rlhf_operator.index import Index
from rlhf_operator.reconcile.last_applied import FINGERPRINT


def test_an_older_version_that_comes_late_changes_nothing() -> None:
    index = Index()
    index.put_pod(KEY, pod(5, phase="Running"))
    index.put_pod(KEY, pod(4, phase="Pending"))
    assert phase(index) == "Running"
    index.put_job(job(7, wrote="ours"))
    index.put_job(job(6))
    result = index.job(KEY)
    assert result is not None
    assert result["status"] == {"wrote": "ours"}
    assert set(result["metadata"]) == {"name", "namespace", "uid", "resourceVersion"}


def test_an_answer_that_comes_after_the_deletion_does_not_bring_a_pod_back() -> None:
    index = Index()
    index.put_pod(KEY, pod(5))
    index.drop_pod(KEY, "job-generation-0", "p1")
    index.put_pod(KEY, pod(6))
    assert phase(index) is None
    index.put_pod(KEY, pod(8, uid="p2"))
    index.drop_pod(KEY, "job-generation-0", "p1")
    assert phase(index) == "Running", "the deletion of the first is not that of the second"


def test_pods_of_an_earlier_job_of_the_same_name_only_take_names() -> None:
    index = Index()
    index.put_pod(KEY, pod(5, owner="old"))
    ours, taken = index.pods(KEY, "u1")
    assert ours == {}
    assert taken == {"job-generation-0"}


def test_a_job_that_was_deleted_and_made_again_is_another_one() -> None:
    index = Index()
    index.put_job(job(5))
    index.drop_job(KEY, "u1")
    assert index.job(KEY) is None
    index.put_job(job(6))
    assert index.job(KEY) is None
    index.put_job(job(9, uid="u2"))
    index.drop_job(KEY, "u1")
    assert index.job(KEY) is not None
    assert list(index.jobs()) == [KEY]


def test_what_was_applied_is_known_until_it_is_deleted() -> None:
    index = Index()
    meta = other(3, annotations={FINGERPRINT: "abc"})
    index.put_other(KEY, "Service", meta)
    assert index.applied(KEY, "u1") == {("Service", "job"): "abc"}
    index.put_other(KEY, "Service", meta | {"resourceVersion": "4", "deletionTimestamp": "2026-08-22T10:00:00Z"})
    assert index.applied(KEY, "u1") == {("Service", "job"): ""}
    index.drop_other(KEY, "Service", "job", "s1")
    assert index.applied(KEY, "u1") == {}


def test_labels_make_nothing_a_jobs_own_and_nothing_is_of_another_job_of_its_name() -> None:
    index = Index()
    index.put_other(KEY, "Service", other(owner=None))
    assert index.applied(KEY, "u1") == {}
    assert index.other(KEY, "u1", "Service", "job") is None, "it is not withdrawn"
    reference = other()["ownerReferences"][0] | {"controller": False}
    index.put_other(KEY, "Service", other(2, ownerReferences=[reference]))
    assert index.applied(KEY, "u1") == {}, "one owner of several is not enough"
    index.put_other(KEY, "Service", other(3, owner="earlier"))
    assert index.applied(KEY, "u1") == {}
    assert index.other(KEY, "earlier", "Service", "job") == "s1"


def test_what_somebody_takes_from_a_job_is_not_its_own_any_more() -> None:
    index = Index()
    index.put_other(KEY, "Service", other(1))
    assert index.put_other(KEY, "Service", other(2, owner=None)), "the job is to hear of it"
    assert index.applied(KEY, "u1") == {}


@pytest.mark.parametrize("kind", ["RLHFJob", "Pod", "Service"])
def test_everything_of_a_kind_is_listed_and_dropped_for_a_comparison(kind: str) -> None:
    index = Index()
    body = job(5) if kind == "RLHFJob" else pod(5)
    index.put(kind, KEY, body)
    meta = body["metadata"]
    assert index.stored_versions(kind) == {meta["uid"]: (KEY, meta["name"], 5)}
    index.drop(kind, KEY, meta["name"], meta["uid"])
    assert index.stored_versions(kind) == {}


def test_only_what_a_decision_reads_is_news() -> None:
    index = Index()
    assert index.put_pod(KEY, pod(5, phase="Pending"))
    assert not index.put_pod(KEY, pod(6, phase="Pending"))
    assert not index.put_pod(KEY, pod(6, phase="Running"))
    assert index.put_pod(KEY, pod(7, phase="Running"))
    assert index.put_pod(KEY, pod(8, uid="p2"))
    assert index.put_job(job(7))
    assert not index.put_job(job(7))
    assert index.put_job(job(8))
    assert index.put_other(KEY, "Service", other())
    assert not index.put_other(KEY, "Service", other(2))
    assert index.put_other(KEY, "Service", other(3, annotations={FINGERPRINT: "new"}))
    assert index.put_other(KEY, "Service", other(4, deletionTimestamp="now"))


def test_what_the_answer_to_a_creation_leaves_out_comes_with_the_watch() -> None:
    index = Index()
    metadata, spec = pod(5), {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}
    assert index.put_pod(KEY, metadata)
    assert index.put_pod(KEY, {**metadata, "spec": spec})
    assert not index.put_pod(KEY, metadata), "the answer may come after the watch"
    ours, _ = index.pods(KEY, "u1")
    assert [each.gates for each in ours.values()] == [("kueue.x-k8s.io/admission",)]


def test_a_pod_seen_again_after_other_news_keeps_its_newest_version() -> None:
    index = Index()
    index.put_pod(KEY, pod(5))
    index.put_pod(KEY, pod(9))
    assert {version for _, _, version in index.stored_versions("Pod").values()} == {9}


def test_a_pod_whose_deletion_no_turn_saw_stays_to_be_accounted_for_once() -> None:
    index = Index()
    index.put_job(job(1))
    index.put_pod(KEY, pod(5))
    last = pod(6)
    last["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 0}
    index.drop_pod(KEY, "job-generation-0", "p1", last)
    index.drop_pod(KEY, "job-generation-0", "p1", last)
    assert phase(index) is None, "its name is free for the next"
    (ended,) = index.ended(KEY, "u1")
    assert ended.uid == "p1"
    assert not index.ended(KEY, "another")
    index.settle(KEY, [ended])
    assert not index.ended(KEY, "u1")

    index.put_pod(KEY, pod(7, uid="p2"))
    index.drop_pod(KEY, "job-generation-0", "p2", last | {"metadata": last["metadata"] | {"uid": "p2"}})
    index.drop_job(KEY, "u1")
    assert not index.ended(KEY, "u1"), "nothing is left of a job that is gone"


def of_class(version: int, named: str | None, **more: Any) -> dict[str, Any]:
    """Return a job that names an operator's class."""
    return job(version, **more) | {"spec": {"operatorClass": named} if named else {}}


def test_a_job_of_another_class_is_not_there_and_not_missed() -> None:
    index = Index(operator_class="blue")
    assert not index.put_job(of_class(5, None))
    assert index.job(KEY) is None
    assert list(index.jobs()) == []
    assert index.stored_versions("RLHFJob") == {"u1": (KEY, "job", 5)}, "the backstop finds it as it is"
    index.drop_job(KEY, "u1")
    assert index.put_job(of_class(6, "blue", uid="u2"))
    assert index.job(KEY) is not None
    default = Index()
    assert default.put_job(of_class(5, None))
    assert default.put_job(of_class(6, "blue", uid="u2")), "what was known of the job of before is to be forgotten"
    assert default.job(KEY) is None
