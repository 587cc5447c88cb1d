"""Models that ``pipelines.train_whitenedcse --keep-models`` trained, for rows of their names."""

from __future__ import annotations

import math
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
    """Return what was trained and kept, by the name of a row as ``row_name`` gives it.

    A name that several folders have is that of the last one.

    Raises:
        ConfigError: a folder has no results or no models, or several settings under a name.
    """
    found: dict[str, TrainedModel] = {}
    for folder in folders:
        named: dict[str, list[Mapping[str, Any]]] = {}
        for result in read_results(folder):
            for row in result["rows"]:
                named.setdefault(row["name"], []).append(result)
        if not named:
            raise ConfigError(
                f"{folder} has no trainings; name the --out of pipelines.train_whitenedcse"
            )
        kept = {name: _model(folder, name, results) for name, results in named.items()}
        models_kept = {_plain(name): model for name, model in kept.items() if model is not None}
        if not models_kept:
            raise ConfigError(
                f"{folder} has results without their models; run pipelines.train_whitenedcse with "
                "--keep-models"
            )
        found |= models_kept
    return found


def trained_recipe(row: Row, trained: Mapping[str, TrainedModel]) -> Recipe | None:
    """Return what computes a row of WhitenedCSE with a model that was trained for it, or None."""
    name = row_name(row)
    model = None if name is None else trained.get(name)
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


def row_name(row: Row) -> str | None:
    """Return the name of a row in letters and digits: of an ablation its setting, else its model.

    None for what WhitenedCSE does not train: rows of other systems beside it.
    """
    if row.source != WHITENED_CSE:
        return None
    if row.table not in ("Table 1", "Table 2"):
        return _plain(row.setting)
    name = _plain(row.model)
    return name if name.startswith("whitenedcse") else None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _encoder_of(row: Row) -> str:
    """Return what a row of the paper was trained from."""
    name = _plain(row.model)
    family = "roberta" if "roberta" in name else "bert"
    return models.plain(family, "large" if "large" in name else "base")


def _model(folder: Path, name: str, results: Sequence[Mapping[str, Any]]) -> TrainedModel | None:
    """Return the model of a name, None where it was not kept."""
    settings = [{**each["options"], "seed": None} for each in results]
    if any(setting != settings[0] for setting in settings):
        raise ConfigError(
            f"{folder} has trainings of several settings called {name}; train each sweep into a "
            "folder of its own"
        )
    best = max(results, key=lambda each: -math.inf if each[BEST] is None else each[BEST])
    path = folder / "models" / best["key"]
    if not path.is_dir():
        return None
    told = (
        f"trained here from {best['encoder']}: {best['steps']:,} steps over "
        f"{best['sentences']:,} sentences, seed {best['options']['seed']}"
    )
    if len(results) > 1:
        told += f", the best of {len(results)} seeds on STS-B dev"
    return TrainedModel(path, best["encoder"], best["pooling"], told)
