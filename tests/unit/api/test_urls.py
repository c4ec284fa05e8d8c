"""Reward addresses: every spelling of a link-local address is rejected, and other servers are accepted."""

import ipaddress

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tests.support.manifests.manifest_cases import changed

from rlhf_api.manifest import ManifestError, parse
from rlhf_api.problems import Problem
from rlhf_api.rules.advice import advice
from rlhf_api.rules.urls import is_loopback, url_problems

FIELD = "spec.models.reward.endpoint.url"
JOB = parse(changed("ppo", {"spec.models.reward": {"endpoint": {"url": "http://rewards"}}}, []))


def found(url: str) -> list[Problem]:
    reward = JOB.spec.models.reward
    assert reward is not None
    assert reward.endpoint is not None
    endpoint = reward.endpoint.model_copy(update={"url": url})
    models = JOB.spec.models.model_copy(update={"reward": reward.model_copy(update={"endpoint": endpoint})})
    return list(url_problems(JOB.spec.model_copy(update={"models": models})))


@st.composite
def spelled(draw: st.DrawFn, network: str) -> str:
    """Generate a URL whose host is an address of a network, in a spelling that resolvers and libraries accept."""
    low, high = (int(address) for address in (ipaddress.ip_network(network)[0], ipaddress.ip_network(network)[-1]))
    number = draw(st.integers(low, high))
    if draw(st.booleans()):
        form = draw(st.sampled_from(["::ffff:{}", "64:ff9b::{}"]))
        return f"http://[{form.format(ipaddress.IPv4Address(number))}]/"
    parts = [number >> 24, number >> 16 & 255, number >> 8 & 255, number & 255]
    joined = draw(st.integers(0, 3))
    tail = int.from_bytes(bytes(parts[3 - joined :]), "big")
    written = [
        draw(st.sampled_from(["{}", "0x{:x}", "0X{:X}", "0{:o}"])).format(part) for part in [*parts[: 3 - joined], tail]
    ]
    return f"http://{'.'.join(written)}{draw(st.sampled_from(['', '.', ':80']))}/latest"


@given(spelled("169.254.0.0/16"))
def test_a_link_local_address_is_refused_in_every_spelling(url: str) -> None:
    assert [problem.field for problem in found(url)] == [FIELD], url


@given(spelled("10.0.0.0/8"))
def test_another_address_is_taken_in_every_spelling(url: str) -> None:
    assert found(url) == [], url


@given(spelled("127.0.0.0/8"))
def test_loopback_is_known_in_every_spelling(url: str) -> None:
    assert is_loopback(url), url


def test_a_server_elsewhere_is_no_loopback() -> None:
    assert not any(map(is_loopback, ("http://rewards:8000", "http://127.example", "http://[fd12::1]", "http://a:b]")))


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST.", "a.localhost", "[::1]", "[::]", "0"])
def test_names_of_loopback(name: str) -> None:
    assert is_loopback(f"http://{name}:8000/score")


def test_no_message_quotes_the_password() -> None:
    text = changed("ppo", {"spec.models.reward": {"endpoint": {"url": "https://robot:hunter2@rewards/score"}}}, [])
    with pytest.raises(ManifestError) as refused:
        parse(text)
    [problem] = refused.value.problems
    assert problem.field == FIELD
    assert problem.value == "https://***@rewards/score"
    assert problem.line is not None
    assert "hunter2" not in str(refused.value)
    header = {"url": "http://rewards/?token=hunter2", "headers": [{"name": "X-API-Key", "value": "hunter3"}]}
    warned = advice(parse(changed("ppo", {"spec.models.reward": {"endpoint": header}}, [])))
    assert len(warned) == 2
    assert not any(secret in str(each) for each in warned for secret in ("hunter2", "hunter3"))


def test_no_problem_shows_a_password_wherever_it_stands() -> None:
    text = changed("ppo", {"spec.trackers.mlflow": {"uri": "https://robot:hunter2@mlflow"}}, [])
    with pytest.raises(ManifestError) as refused:
        parse(text)
    assert "https://***@mlflow" in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_one_problem_does_not_hide_another() -> None:
    text = changed(
        "ppo", {"spec.models.reward": {"endpoint": {"url": "http://a:b@rewards"}}, "spec.rollout.batchSize": 100}, []
    )
    with pytest.raises(ManifestError) as refused:
        parse(text)
    assert {problem.field for problem in refused.value.problems} >= {FIELD, "spec.rollout.batchSize"}
    assert yaml.safe_load(text)["spec"]["rollout"]["batchSize"] == 100
