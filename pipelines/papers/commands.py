"""The command that computes a row's figures by itself."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.papers.data import Data
from pipelines.papers.encoders import Model
from pipelines.papers.recipes import NLI, WHITENING_BERT, Kind, Measure, Recipe, Setting


@dataclass(frozen=True, kw_only=True)
class Files:
    """What the user gives beside the sets.

    Attributes:
        nli: Parquet of NLI sentences.
        word_vectors: file of word vectors.
        word_counts: file of words and their counts.
        quora: folder of the Quora set in BEIR form.
    """

    nli: str | None = None
    word_vectors: str | None = None
    word_counts: str | None = None
    quora: str | None = None


def command_of(
    recipe: Recipe, model: Model | None, names: Sequence[str], files: Files, data: Data
) -> str:
    """Return the command line whose figures are the row's.

    Args:
        recipe: of the row.
        model: what runs it; None for the row's own by its name.
        names: the row's sets; none for all.
        files: of the user; what is not given is named in capitals.
        data: the sets.
    """
    setting = recipe.setting
    words = ["python", "-m", "pipelines.reproduce_papers", "OUT"]
    if setting.measure is Measure.RTE:
        # No command of the tool scores it by the cosine.
        words += ["--only", f"{WHITENING_BERT}:Table 3"]
        flag = "--stand-in" if model is not None and model.stands_in else "--model"
        return shlex.join([*words, flag, str(recipe.hub) if model is None else model.name])
    if recipe.kind is Kind.WORDS:
        words += ["--word-vectors", files.word_vectors or "VECTORS"]
        if setting.sif:
            words += ["--word-counts", files.word_counts or "COUNTS"]
        return shlex.join(words)
    words = list(_COMMANDS[setting.measure])
    words += _data_words(setting, names, files, data)
    words += _model_words(recipe, model)
    words += _transform_words(setting, model, files)
    return shlex.join([*words, "--json"])


_COMMANDS = {
    Measure.STS: ("whiten-index", "eval", "sts"),
    Measure.TRANSFER: ("python", "-m", "pipelines.papers.transfer"),
    Measure.RETRIEVAL: ("whiten-index", "eval", "retrieval"),
}


def _data_words(setting: Setting, names: Sequence[str], files: Files, data: Data) -> list[str]:
    if setting.measure is Measure.RETRIEVAL:
        return [files.quora or "QUORA", "--metric", "mrr@10"]
    words: list[str] = []
    if setting.measure is Measure.STS:
        words.append(str(data.pairs_path))
        known = [each.name for each in data.sets()]
        here = [name for name in names if name in known]
        if here and len(here) < len(known):
            words += [word for name in here for word in ("--set", name)]
        splits = [f"{name}={split}" for name, split in data.splits.items()]
        return words + [word for split in splits for word in ("--split", split)]
    here = [name.lower() for name in names if data.task(name) is not None]
    if data.folder is not None:
        words += [str(data.task_path(name)) for name in here]
        return words
    return [word for name in here for word in ("--set", name)]


def _model_words(recipe: Recipe, model: Model | None) -> list[str]:
    setting = recipe.setting
    name = model.name if model is not None else str(recipe.hub)
    limit = setting.max_length if model is None else model.tokens(setting.max_length)
    words = ["--model", name, "--pooling", setting.pooling]
    words += ["--layers", ",".join(map(str, setting.layers))]
    return words if limit is None else [*words, "--max-length", str(limit)]


def _transform_words(setting: Setting, model: Model | None, files: Files) -> list[str]:
    if setting.k is None:
        return []
    k = setting.k if model is None else model.width(setting.k)
    words = ["--whiten", "whitening", "--k", str(k)]
    if setting.fit != "target":
        words += ["--fit", (files.nli or "NLI") if setting.fit == NLI else setting.fit]
    return words
