"""examples/kubernetes: valid for Kubernetes, and true of what they run: flags, routes, metrics, times."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from continuum.cli.serve_args import engine_config, server_config
from continuum.cli.serve_flags import add_serve_arguments
from engine.api.app import ROUTERS
from engine.api.tenants.key_file import read_key_file
from engine.config.kv_transfer import HANDOVER_S
from engine.metrics.table import TABLE
from eval.route.command import add_arguments

FOLDER = Path(__file__).resolve().parent.parent / "examples/kubernetes"
OF_OTHERS = ("keda.sh/", "inference.networking.k8s.io/", "gateway.networking.k8s.io/", "kustomize")
"""Groups of resources of which Kubernetes itself has no schema."""
VERSION = "1.33"
Resource = dict[str, Any]


def resources() -> list[Resource]:
    return [
        resource
        for path in sorted(FOLDER.glob("*.yaml"))
        for resource in yaml.safe_load_all(path.read_text())
    ]


def one(kind: str, name: str = "continuum") -> Resource:
    (found,) = [each for each in resources() if each["kind"] == kind and each["metadata"]["name"] == name]
    return found


def container(kind: str, name: str) -> Resource:
    (found,) = one(kind, name)["spec"]["template"]["spec"]["containers"]
    return dict(found)


@pytest.mark.parametrize("resource", resources(), ids=lambda each: f"{each['kind']}")
def test_kubernetes_accepts_it(resource: Resource) -> None:
    """Also no field that Kubernetes does not know."""
    if resource["apiVersion"].startswith(OF_OTHERS):
        pytest.skip("Kubernetes itself has no schema of it")
    kubernetes_validate.validate(resource, VERSION, strict=True)


def test_a_wrong_field_would_be_found() -> None:
    wrong = one("StatefulSet")
    wrong["spec"]["replica"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSION, strict=True)


def test_the_server_accepts_its_flags(tmp_path: Path) -> None:
    """And Kubernetes waits longer for its end than the server takes."""
    keys = tmp_path / "keys.toml"
    keys.write_text(one("Secret", "continuum-keys")["stringData"]["keys.toml"])
    assert read_key_file(str(keys))
    given = [
        flag.replace("/keys/keys.toml", str(keys)) for flag in container("StatefulSet", "continuum")["args"]
    ]
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    args = parser.parse_args(given)
    assert engine_config(args).kv_transfer is not None
    config = server_config(args)
    pod = one("StatefulSet")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > config.shutdown_grace_s + HANDOVER_S
    ports = [port["containerPort"] for port in container("StatefulSet", "continuum")["ports"]]
    assert ports == [config.port]


def test_the_route_accepts_its_flags_and_names_each_server() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(container("Deployment", "continuum-route")["args"])
    server = one("StatefulSet")["spec"]
    names = [f"http://continuum-{index}.{server['serviceName']}:8000" for index in range(server["replicas"])]
    assert args.urls == names


def test_probes_ask_what_there_is() -> None:
    paths = {route.path for router in ROUTERS for route in router.routes}  # type: ignore[attr-defined]
    for kind, name in (("StatefulSet", "continuum"), ("Deployment", "continuum-route")):
        probes = [probe for key, probe in container(kind, name).items() if key.endswith("Probe")]
        assert probes
        assert {probe["httpGet"]["path"] for probe in probes} <= paths


def test_mounts_have_their_volumes() -> None:
    spec = one("StatefulSet")["spec"]
    volumes = {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
    claims = {claim["metadata"]["name"] for claim in spec["volumeClaimTemplates"]}
    assert {
        mount["name"] for mount in container("StatefulSet", "continuum")["volumeMounts"]
    } == volumes | claims


def test_scaling_asks_for_metrics_that_there_are() -> None:
    queries = [trigger["metadata"]["query"] for trigger in one("ScaledObject")["spec"]["triggers"]]
    named = {name for query in queries for name in re.findall(r"(?:vllm|continuum):\w+", query)}
    assert named
    assert named <= {metric.name for metric in TABLE}


def test_all_files_are_in_the_kustomization_or_said_not_to_be() -> None:
    (listed,) = yaml.safe_load_all((FOLDER / "kustomization.yaml").read_text())
    page = (FOLDER.parent.parent / "docs/kubernetes.md").read_text()
    for path in FOLDER.glob("*.yaml"):
        told = f"| `{path.name}` | not in the kustomization"
        assert (path.name in listed["resources"]) != (told in page) or path.name == "kustomization.yaml"


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_builds_it() -> None:
    built = subprocess.run(["kubectl", "kustomize", str(FOLDER)], capture_output=True, text=True, check=True)
    kinds = [each["kind"] for each in yaml.safe_load_all(built.stdout)]
    assert sorted(kinds) == sorted(
        [
            *("Deployment", "PersistentVolumeClaim", "PodDisruptionBudget", "Secret", "Service"),
            *("Service", "StatefulSet"),
        ]
    )
