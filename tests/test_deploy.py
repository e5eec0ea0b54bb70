"""The recipes of deploy/ as far as they can be read here: their own tools check the rest, see docs/deploy.md."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import equidp

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yml").read_text(encoding="utf-8"))
KUBERNETES = list(yaml.safe_load_all((DEPLOY / "kubernetes.yml").read_text(encoding="utf-8")))
PODS = [one for one in KUBERNETES if "template" in one.get("spec", {})]


def named(things: list[dict[str, Any]]) -> list[str]:
    """For a test's name."""
    return [one["metadata"]["name"] for one in things]


def test_the_image_copies_what_exists_and_the_context_holds_no_more() -> None:
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", (DEPLOY / "Dockerfile").read_text(), flags=re.M)
    words = {word for line in copied for word in line.split()}
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert all((ROOT / word).exists() for word in words)
    assert {line[1:] for line in ignored if line.startswith("!")} == words
    assert "conf/local" in ignored


def test_no_recipe_runs_as_root_or_holds_a_password() -> None:
    assert re.findall(r"^USER (.*)$", (DEPLOY / "Dockerfile").read_text(), flags=re.M) == ["10001:10001"]
    for service in COMPOSE["services"].values():
        secrets = [value for name, value in service["environment"].items() if "PASSWORD" in name]
        assert all(value.startswith("${POSTGRES_PASSWORD:?") for value in secrets)
        assert "no-new-privileges:true" in service["security_opt"]
    for pod in PODS:
        for container in pod["spec"]["template"]["spec"]["containers"]:
            secrets = [one for one in container.get("env", ()) if "PASSWORD" in one["name"]]
            assert all("secretKeyRef" in one["valueFrom"] for one in secrets)


@pytest.mark.parametrize("pod", PODS, ids=named(PODS))
def test_a_pod_may_do_no_more_than_it_must(pod: dict[str, Any]) -> None:
    spec = pod["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["automountServiceAccountToken"] is False
    for container in spec["containers"]:
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert {"requests", "limits"} == set(container["resources"])
        own = container["image"].endswith(f"/equidp:{equidp.__version__}")
        assert own or container["image"].startswith("postgres:")


def test_a_service_is_reached_under_the_name_and_port_that_others_ask_for() -> None:
    text = (DEPLOY / "compose.yml").read_text() + (DEPLOY / "kubernetes.yml").read_text()
    ports = {one["metadata"]["name"]: one["spec"]["ports"][0]["port"] for one in KUBERNETES if one["kind"] == "Service"}
    asked = set(re.findall(r"(?:tcp|http)://(\w+):(\d+)", text)) - {("127", "0")}
    assert asked == {("scheduler", "8786"), ("mlflow", "5000")}
    assert all(ports[name] == int(port) for name, port in asked)
    assert {"postgres", "mlflow", "scheduler"} == set(ports)
    assert {"postgres", "mlflow", "scheduler"} < set(COMPOSE["services"])


@pytest.mark.parametrize(
    ("words", "variables", "told"),
    [
        ([], {}, "Give the command"),
        (["kedro"], {}, "Set MLFLOW_TRACKING_URI"),
        (["kedro"], {"MLFLOW_TRACKING_URI": "http://here:5000"}, "Ask for two tasks"),
        (["kedro"], {"MLFLOW_TRACKING_URI": "http://here:5000", "SLURM_NTASKS": "2"}, "No project"),
    ],
    ids=["without a command", "without a server", "with one task", "without a project"],
)
def test_a_slurm_job_says_what_it_lacks(words: list[str], variables: dict[str, str], told: str, tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash")
    done = subprocess.run(
        [bash, str(DEPLOY / "slurm.sh"), *words], cwd=tmp_path, env=variables, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert told in done.stderr
    assert list(tmp_path.iterdir()) == []
