"""Ray's own launcher takes the cluster file, and knows the commands that the README has."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "pipelines" / "deploy" / "ray"
pytestmark = pytest.mark.service


def test_rays_schema_takes_the_cluster() -> None:
    import jsonschema
    import ray

    schema = json.loads((Path(ray.__file__).parent / "autoscaler/ray-schema.json").read_text())
    jsonschema.validate(yaml.safe_load((FOLDER / "cluster.yaml").read_text()), schema)


def test_ray_checks_and_fills_in_the_cluster() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load((FOLDER / "cluster.yaml").read_text())
    filled = prepare_config(config)
    validate_config(filled)
    assert filled["max_workers"] == config["max_workers"]


def test_ray_knows_the_commands_shown() -> None:
    from ray.scripts.scripts import cli

    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    lines = re.findall(
        r"^ray .*$", "".join(re.findall(r"^```\n(.*?)^```", text, re.M | re.S)), re.M
    )
    assert len(lines) >= 7
    for line in lines:
        name, *rest = shlex.split(line)[1:]
        cli.commands[name].make_context(name, rest)
