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
from pipelines.papers.recipes import WHITENED_CSE, Kind, Measure, Recipe, Refusal, Setting
from pipelines.train_whitenedcse import read_results
from whiten_index.errors import ConfigError
from whiten_index.training.training_config import BEST, TrainingConfig

# Of the paper's training, but for a last batch that is not full.
SENTENCES = 999_936


@dataclass(frozen=True)
class TrainedModel:
    """The model of a name; of several seeds the best one on STS-B dev, as papers choose.

    Attributes:
        folder: of the model.
        encoder: that was trained.
        pooling: of its features.
        seen: sentences, again in each epoch.
        told: how it was trained.
    """

    folder: Path
    encoder: str
    pooling: str
    seen: int
    told: str


def read_trained(folders: Sequence[Path]) -> dict[str, TrainedModel | Refusal]:
    """Return what was trained, or why it cannot be used, by the name that ``row_name`` gives.

    A name that several folders have is that of the last one.

    Raises:
        ConfigError: a folder has no results, or no models.
    """
    found: dict[str, TrainedModel | Refusal] = {}
    for folder in folders:
        named: dict[str, list[Mapping[str, Any]]] = {}
        for result in read_results(folder):
            for row in result["rows"]:
                named.setdefault(row["name"], []).append(result)
        if not named:
            raise ConfigError(
                f"{folder} has no trainings; name the --out of pipelines.train_whitenedcse"
            )
        if not any((folder / "models").glob("*")):
            raise ConfigError(
                f"{folder} has results without their models; run pipelines.train_whitenedcse with "
                "--keep-models"
            )
        found |= {_plain(name): _model(folder, name, same) for name, same in named.items()}
    return found


def trained_recipe(
    row: Row, trained: Mapping[str, TrainedModel | Refusal]
) -> Recipe | Refusal | None:
    """Return what computes a row of WhitenedCSE with a model that was trained for it, or None."""
    name = row_name(row)
    model = None if name is None else trained.get(name)
    if model is None or isinstance(model, Refusal):
        return model
    measure = Measure.TRANSFER if row.table == "Table 2" else Measure.STS
    setting = Setting(measure=measure, pooling=model.pooling)
    own, instead = _encoder_of(row), list[str]()
    if models.short(model.encoder) != models.short(own):
        instead.append(f"trained here from {model.encoder}, and not from {own}")
    if model.seen < SENTENCES:
        instead.append(f"trained here on {model.seen:,} sentences, and not on {SENTENCES:,}")
    why = "; ".join(instead) or None
    return Recipe(Kind.TRAINED, str(model.folder), setting, (model.told,), instead=why)


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


def _model(folder: Path, name: str, results: Sequence[Mapping[str, Any]]) -> TrainedModel | Refusal:
    """Return the model of a name, or why there is none to be used."""
    settings = [{**each["options"], "seed": None} for each in results]
    if any(setting != settings[0] for setting in settings):
        return Refusal(
            f"{folder} has trainings of several settings called {name}; train each sweep into a "
            "folder of its own"
        )
    best = max(results, key=lambda each: -math.inf if each[BEST] is None else each[BEST])
    path = folder / "models" / best["key"]
    if not path.is_dir():
        return Refusal(
            f"the model of {name} in {folder} was not kept; run pipelines.train_whitenedcse with "
            "--keep-models"
        )
    told = (
        f"trained here from {best['encoder']}: {best['steps']:,} steps over "
        f"{best['sentences']:,} sentences, seed {best['options']['seed']}"
    )
    if len(results) > 1:
        told += f", the best of {len(results)} seeds on STS-B dev"
    batch = best["options"].get("batch_size", TrainingConfig.batch_size)
    return TrainedModel(path, best["encoder"], best["pooling"], best["steps"] * batch, told)
