"""Policies are selected by name; the error for a wrong name lists the existing ones."""

from __future__ import annotations

import pickle
from dataclasses import fields

import pytest

from continuum.cli.main import main
from continuum.config import ContinuumConfig
from engine.core.policy import PolicyContext
from eval.baselines.catalog import parse_policies, parse_policy, policy_names, serving_policy
from eval.errors import PolicyError
from tests.eval.baselines.policy_room import PolicyRoom


@pytest.mark.parametrize("name", [syntax.partition("[")[0] for syntax, _ in policy_names()])
def test_every_policy_serves_a_job(name: str) -> None:
    """Each policy runs two turns of a job, with the API server's reports in between."""
    room = PolicyRoom(name)
    room.play("a", 20, "ls")
    room.wait(1)
    room.play("a", 4)
    assert set(room.finished) == {"a1", "a2"}
    room.scheduler.check_invariants()


@pytest.mark.parametrize("name", [syntax.partition("[")[0] for syntax, _ in policy_names(serving=True)])
def test_a_policy_to_serve_with_crosses_into_the_core_process(name: str) -> None:
    """The factory can be pickled for the core process, and needs no knowledge."""
    factory = pickle.loads(pickle.dumps(serving_policy(name)))
    assert factory(PolicyContext(16, 100)).pins() is not None


@pytest.mark.parametrize("name", ["oracle", "paper", "infercept"])
def test_a_policy_that_must_know_the_future_or_a_profile_cannot_serve(name: str) -> None:
    """The error says that the policy must know the future or a profile."""
    with pytest.raises(PolicyError, match=f"Policy {name} needs knowledge that only a simulation has"):
        serving_policy(name)


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        (
            "lru",
            "argument --scheduling-policy: Unknown policy 'lru'; choose from fcfs, priority",
        ),
        ("oracle", "Policy oracle needs knowledge that only a simulation has"),
        ("gate:2", "gate:FRACTION must be a number from 0 to 1, got '2'"),
    ],
)
def test_a_server_with_a_policy_that_cannot_be_does_not_start(
    policy: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server exits with one sentence and code 2."""
    assert main(["serve", "model", "--scheduling-policy", policy]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("lru", r"Unknown policy 'lru'; choose from fcfs, .*fixed-ttl\[:SECONDS\], .*oracle"),
        ("", "Unknown policy ''"),
        ("fcfs:1", "Policy 'fcfs:1' must have the form fcfs"),
        ("fixed-ttl:", r"Policy 'fixed-ttl:' must have the form fixed-ttl\[:SECONDS\]"),
        ("fixed-ttl:soon", "fixed-ttl:SECONDS must be a number of at least 0, got 'soon'"),
        ("fixed-ttl:-1", "fixed-ttl:SECONDS must be a number of at least 0, got '-1'"),
        ("fixed-ttl:nan", "must be a number of at least 0, got 'nan'"),
        ("fixed-ttl:inf", "must be a number of at least 0, got 'inf'"),
        ("gate:1.5", "gate:FRACTION must be a number from 0 to 1, got '1.5'"),
        ("continuum:ttl=3", "continuum has no option 'ttl'; choose from ttl_rule, horizon_s"),
        ("continuum:horizon_s=x", "continuum:horizon_s must be a number, got 'x'"),
        ("continuum:horizon_s=1,horizon_s=2", "continuum:horizon_s is given twice"),
        ("continuum:horizon_s=-1", "horizon_s must not be negative, got -1"),
        ("continuum:ttl_rule=none", "ttl_rule must be one of price, median-horizon, fixed"),
    ],
)
def test_a_wrong_name_or_parameter_is_one_sentence(text: str, told: str) -> None:
    """The error names the wrong part and the existing alternatives."""
    with pytest.raises(PolicyError, match=told):
        parse_policy(text)


def test_every_option_that_a_server_has_can_be_simulated() -> None:
    """Options have the same names, with _ for -."""
    for field in fields(ContinuumConfig):
        value = {"infer_jobs": "false", "estimator_state": None}.get(field.name, str(field.default).lower())
        if value is not None:
            parse_policy(f"continuum:{field.name}={value}")


def test_several_policies_are_separated_by_commas() -> None:
    """Commas also separate a policy's options: a part with = and without : belongs to the policy before
    it."""
    policies = parse_policies("fcfs, continuum:ttl_rule=fixed,fixed_ttl_s=10,fixed-ttl:5,gate")
    names = [policy.name for policy in policies]
    assert names == ["fcfs", "continuum:ttl_rule=fixed,fixed_ttl_s=10", "fixed-ttl:5", "gate"]
    with pytest.raises(PolicyError, match="Policy fcfs is named twice"):
        parse_policies("fcfs,gate,fcfs")
    with pytest.raises(PolicyError, match="Unknown policy ''"):
        parse_policies(",")
