"""The files for a Ray cluster: they parse, hang together, and name options that there are."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from whiten_index.cli import cli

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "pipelines" / "deploy" / "ray"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def cluster() -> dict[str, Any]:
    return dict(yaml.safe_load((FOLDER / "cluster.yaml").read_text()))


def shown() -> list[list[str]]:
    """Commands of the README's blocks, each as its words."""
    blocks = re.findall(r"^```\n(.*?)^```", README, re.M | re.S)
    return [shlex.split(line) for block in blocks for line in block.splitlines() if line]


def started_there() -> list[list[str]]:
    """Commands of ours that ``ray exec`` starts, up to where the shell takes over."""
    inner = [words[-1] for words in shown() if words[:2] == ["ray", "exec"]]
    ours = [shlex.split(line) for line in inner if line.startswith("whiten-index ")]
    ends = [next((n for n, word in enumerate(line) if word == ">"), len(line)) for line in ours]
    return [line[:end] for line, end in zip(ours, ends, strict=True)]


def test_the_cluster_has_what_the_launcher_requires() -> None:
    config = cluster()
    assert {"cluster_name", "provider", "auth", "available_node_types"} <= set(config)
    types = config["available_node_types"]
    assert config["head_node_type"] in types
    for each in types.values():
        assert {"resources", "node_config"} <= set(each)
        assert {"InstanceType", "ImageId", "SecurityGroupIds"} <= set(each["node_config"])


def test_the_head_does_no_work_and_workers_are_on_spot() -> None:
    config = cluster()
    types = dict(config["available_node_types"])
    head = types.pop(config["head_node_type"])
    assert head["resources"] == {"CPU": 0}
    assert "InstanceMarketOptions" not in head["node_config"]
    for each in types.values():
        assert each["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
        assert each["resources"]["GPU"] == 1
        # All are there before a build begins: it waits less long than one takes to set up.
        assert each["min_workers"] == each["max_workers"]
    assert config["max_workers"] == sum(each["max_workers"] for each in types.values())


def test_only_the_machines_themselves_reach_ray() -> None:
    """Its ports let whoever reaches them run code."""
    (start,) = [line for line in cluster()["head_start_ray_commands"] if "--head" in line]
    assert "--dashboard-host=127.0.0.1" in start
    assert "0.0.0.0" not in (FOLDER / "cluster.yaml").read_text()


def test_the_shared_folder_is_mounted_where_the_readme_has_it() -> None:
    (mount,) = [line for line in cluster()["setup_commands"] if "mount -t nfs4" in line]
    assert mount.split()[-1] == "/data"
    for words in started_there():
        for option in ("--store", "--out"):
            assert words[words.index(option) + 1].startswith("/data/")


def test_every_machine_has_this_release() -> None:
    (line,) = [line for line in cluster()["setup_commands"] if "whiten-index[" in line]
    extras, version = re.findall(r"whiten-index\[(.*?)\]==(\S+?)'", line)[0]
    assert version == PROJECT["version"]
    # `ray` is an extra of its own.
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    (theirs,) = re.findall(r"'ray\[default\]==([\d.]+)'", line)
    assert re.findall(r"'ray\[default\]==([\d.]+)'", README) == [theirs]


@pytest.mark.parametrize("words", started_there(), ids=lambda words: " ".join(words)[-40:])
def test_commands_name_options_that_there_are(words: list[str]) -> None:
    command = cli.commands[words[1]]
    params = command.make_context(words[1], words[2:]).params
    assert params["runner"] == "ray"
    assert params["address"] == "auto"
    assert params["device"] == "cuda"
    assert 0 < params["workers"] <= cluster()["max_workers"]


def test_every_command_is_one_of_ray_or_named_beside_it() -> None:
    known = {"up", "exec", "status", "dashboard", "monitor", "down"}
    for words in shown():
        assert words[0] in {"ray", "pip", "aws"}
        if words[0] == "ray":
            assert words[1] in known
            assert "pipelines/deploy/ray/cluster.yaml" in words
    assert (ROOT / "pipelines/deploy/ray/cluster.yaml").exists()
    assert len(started_there()) >= 2


def test_words_to_replace_are_explained() -> None:
    config = (FOLDER / "cluster.yaml").read_text()
    config = "\n".join(line for line in config.splitlines() if not line.strip().startswith("#"))
    found = set(re.findall(r"(?<=[\[: ])(AMI|SECURITY_GROUP|FILE_SYSTEM)(?=[\]\n.])", config))
    explained = set(re.findall(r"^- `([A-Z_]+)`", README, re.M))
    assert found == explained == {"AMI", "SECURITY_GROUP", "FILE_SYSTEM"}


@pytest.mark.parametrize("status", [0, 2, 5, 6, 7, 11, 12, 130])
def test_each_exit_status_is_explained(status: int) -> None:
    assert re.search(rf"^\| ({status}|.*\b{status}\b[ ,].*?) \|", README, re.M)


def test_the_link_to_the_costs_leads_somewhere() -> None:
    for link in re.findall(r"\]\((\.\./[^)]*)\)", README):
        assert (FOLDER / link).resolve().exists()
