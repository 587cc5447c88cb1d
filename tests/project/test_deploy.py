"""Ready-made schedules: what they start exists, takes their options, and ends as they expect."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from whiten_index.cli.monitoring import OUTCOMES
from whiten_index.cli.nightly_job import NightlyJob
from whiten_index.cli.signals import INTERRUPTED
from whiten_index.serving.serve_options import PROBES, ServeOptions

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "pipelines" / "deploy"
PROGRAM = "/opt/whiten-index/.venv/bin/whiten-index"
UNITS = sorted((DEPLOY / "systemd").iterdir())
RULES = DEPLOY / "prometheus-rules.yaml"


def tool(name: str, *, package: str) -> str:
    """Return the path of a tool; without it a test is skipped, and fails in CI."""
    found = shutil.which(name)
    if found is None:
        if os.environ.get("CI"):
            pytest.fail(f"install the package {package}: in CI no test is skipped for want of it")
        pytest.skip(f"{name} is not installed")
    return found


@pytest.fixture(scope="module")
def analyze() -> str:
    """Path of systemd-analyze."""
    return tool("systemd-analyze", package="systemd")


@pytest.fixture(scope="module")
def promtool() -> str:
    """Path of Prometheus's own checker of rules."""
    return tool("promtool", package="prometheus")


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The units with a program that is there, each template beside an instance of it."""
    for unit in UNITS:
        text = unit.read_text().replace(PROGRAM, sys.executable)
        for name in (unit.name, unit.name.replace("@.", "@news.")):
            (tmp_path / name).write_text(text)
    return tmp_path


def faults(analyze: str, folder: Path) -> str:
    """Return what systemd says of the units in a folder; it may end with 0 and still complain."""
    done = subprocess.run(
        [analyze, "verify", "--man=no", *sorted(f"./{unit.name}" for unit in folder.iterdir())],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "LC_ALL": "C", "XDG_RUNTIME_DIR": str(folder.parent)},
    )
    said = done.stdout + done.stderr
    return said if said or done.returncode == 0 else f"exit status {done.returncode}"


def test_systemd_finds_no_fault(analyze: str, units: Path) -> None:
    assert faults(analyze, units) == ""


def documents() -> dict[str, Any]:
    read = yaml.safe_load_all((DEPLOY / "kubernetes" / "cronjob.yaml").read_text())
    return {document["kind"]: document for document in read}


def test_the_deployment_asks_what_the_server_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    read = yaml.safe_load_all((DEPLOY / "kubernetes" / "serve.yaml").read_text())
    deployment, service = read
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    (variable,) = [each for each in container["env"] if "valueFrom" in each]
    monkeypatch.setenv(variable["name"], "0123456789abcdef")
    _, *given = container["args"]
    options = {name[2:]: value for name, value in zip(given[::2], given[1::2], strict=True)}
    chosen = ServeOptions(**{**options, "port": int(options["port"])})
    assert chosen.port == container["ports"][0]["containerPort"]
    assert chosen.max_seconds < pod["spec"]["terminationGracePeriodSeconds"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in PROBES


def job_texts() -> dict[str, str]:
    example = (DEPLOY / "job.toml").read_text()
    return {
        "example": example,
        "with its comments": re.sub(r"^# (?=[a-z-]+ = |\[\[)", "", example, flags=re.MULTILINE),
        "kubernetes": documents()["ConfigMap"]["data"]["job.toml"],
        "page": re.findall(r"(?ms)^```toml\n(.*?)^```", (ROOT / "docs/nightly.md").read_text())[0],
    }


@pytest.mark.parametrize("name", job_texts())
def test_the_job_files_are_taken(tmp_path: Path, name: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(job_texts()[name])
    job = NightlyJob.read(path)
    assert job.index
    assert job.keep_versions == 7


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.mark.parametrize(
    ("outcome", "status", "ago", "expected"),
    [
        ("published", 0, 1, set()),
        ("published", 0, 37, {"WhitenIndexStale"}),
        ("failed", 3, 1, {"WhitenIndexFailed"}),
        ("gate_failed", 9, 1, {"WhitenIndexGateFailed"}),
        ("interrupted", INTERRUPTED, 5, set()),
        ("interrupted", INTERRUPTED, 7, {"WhitenIndexInterrupted"}),
    ],
)
def test_prometheus_alerts(
    promtool: str, tmp_path: Path, outcome: str, status: int, ago: int, expected: set[str]
) -> None:
    """Its own tool runs the rules over ``ago`` hours since the last run."""
    index = '{instance="host:9100", index="/var/lib/news"'
    series = {
        f"whiten_index_last_run_exit_code{index}}}": status,
        f"whiten_index_last_success_timestamp_seconds{index}}}": 0,
    }
    for each in OUTCOMES:
        is_this = each == outcome
        series[f'whiten_index_last_run_outcome{index}, outcome="{each}"}}'] = int(is_this)
    test = {
        "rule_files": [str(RULES)],
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": name, "values": f"{value}x2400"} for name, value in series.items()
                ],
                "alert_rule_test": [
                    {"eval_time": f"{ago}h", "alertname": rule["alert"], "exp_alerts": []}
                    for rule in alerts()
                ],
            }
        ],
    }
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump(test))
    done = subprocess.run([promtool, "test", "rules", path], capture_output=True, text=True)
    # Each alert that was not expected is named.
    assert set(re.findall(r"alertname: ?(\w+)", done.stdout + done.stderr)) == expected
    assert (done.returncode == 0) == (not expected)
