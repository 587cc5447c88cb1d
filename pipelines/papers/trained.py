"""Models that ``pipelines.train_whitenedcse --keep-models`` trained, for rows of their names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.papers import models
from pipelines.papers.published import Row
from pipelines.papers.recipes import WHITENED_CSE, Kind, Measure, Recipe, Setting
from pipelines.train_whitenedcse import read_results
from whiten_index.errors import ConfigError
from whiten_index.training.config import BEST


@dataclass(frozen=True)
class TrainedModel:
    """The model of a name; of several seeds the best one on STS-B dev, as papers choose.

    Attributes:
        folder: of the model.
        encoder: that was trained.
        pooling: of its features.
        told: how it was trained.
    """

    folder: Path
    encoder: str
    pooling: str
    told: str


def read_trained(folders: Sequence[Path]) -> dict[str, TrainedModel]:
    """Return what was trained, by the name of a row as ``row_name`` gives it; the last one counts.

    Raises:
        ConfigError: a folder has no results, or no models.
    """
    found: dict[str, TrainedModel] = {}
    for folder in folders:
        results = read_results(folder)
        if not results:
            raise ConfigError(
                f"{folder} has no trainings; name the --out of pipelines.train_whitenedcse"
            )
        named: dict[str, list[Mapping[str, Any]]] = {}
        for result in results:
            for row in result["rows"]:
                named.setdefault(_plain(row["name"]), []).append(result)
        found |= {name: _model(folder, members) for name, members in named.items()}
    return found


def trained_recipe(row: Row, trained: Mapping[str, TrainedModel]) -> Recipe | None:
    """Return what computes a row of WhitenedCSE with a model that was trained for it, or None."""
    if row.source != WHITENED_CSE:
        return None
    model = trained.get(row_name(row))
    if model is None:
        return None
    measure = Measure.TRANSFER if row.table == "Table 2" else Measure.STS
    setting = Setting(measure=measure, pooling=model.pooling)
    own = _encoder_of(row)
    instead = (
        None
        if models.short(model.encoder) == models.short(own)
        else f"trained here from {model.encoder}, and not from {own}"
    )
    return Recipe(Kind.TRAINED, str(model.folder), setting, (model.told,), instead=instead)


def row_name(row: Row) -> str:
    """Return the name of a row: of an ablation its setting, else its model; letters and digits."""
    return _plain(row.model if row.table in ("Table 1", "Table 2") else row.setting)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _encoder_of(row: Row) -> str:
    """Return what a row of the paper was trained from."""
    name = _plain(row.model)
    family = "roberta" if "roberta" in name else "bert"
    return models.plain(family, "large" if "large" in name else "base")


def _model(folder: Path, results: Sequence[Mapping[str, Any]]) -> TrainedModel:
    best = max(results, key=lambda each: -1e9 if each[BEST] is None else each[BEST])
    path, options = folder / "models" / best["key"], best["options"]
    if not path.is_dir():
        raise ConfigError(
            f"{folder} has results without their models; run pipelines.train_whitenedcse with "
            "--keep-models"
        )
    told = (
        f"trained here from {best['encoder']}: {best['steps']:,} steps over "
        f"{best['sentences']:,} sentences, seed {options['seed']}"
    )
    if len(results) > 1:
        told += f", the best of {len(results)} seeds on STS-B dev"
    return TrainedModel(path, best["encoder"], best["pooling"], told)
