"""A setting computed with a model at hand, or found among what is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pipelines.papers.commands import Files
from pipelines.papers.data import Data
from pipelines.papers.encoders import Encoders, Model
from pipelines.papers.entailment import evaluate_entailment
from pipelines.papers.kept import Kept, file_identity
from pipelines.papers.published import Row
from pipelines.papers.recipes import NLI, Measure, Recipe, Refusal, Setting
from pipelines.papers.settings import recipe_of
from pipelines.papers.trained import TrainedModel, trained_recipe
from pipelines.papers.transfer import evaluate_transfer
from pipelines.papers.transfer_tasks import Task
from pipelines.papers.words import (
    Vectors,
    WordAverages,
    read_sif_weights,
    read_vectors,
    tokenize,
    word_scores,
)
from whiten_index.encoding.load_encoder import resolve_encoder
from whiten_index.evaluation.sts_sets import StsSet
from whiten_index.measure.eval_config import EvalConfig, RetrievalConfig
from whiten_index.measure.evaluate_retrieval import evaluate_retrieval
from whiten_index.measure.evaluate_sts import evaluate_sts
from whiten_index.measure.spaces import TextEmbedder
from whiten_index.whitening.whitening_config import Kind as Transform
from whiten_index.whitening.whitening_config import WhiteningConfig

_MRR = "mrr@10"
# The seven sets of the papers, whose texts are encoded together.
_TRANSFER_SETS = ["MR", "CR", "SUBJ", "MPQA", "SST2", "TREC", "MRPC"]


@dataclass(frozen=True)
class Bench:
    """Computes settings.

    Attributes:
        data: the sets.
        encoders: the models and their states.
        kept: results of this run and those before.
        files: what the user gives beside.
        work: folder of what is kept.
        trained: models for rows of WhitenedCSE, by the rows' names.
    """

    data: Data
    encoders: Encoders
    kept: Kept
    files: Files
    work: Path
    trained: Mapping[str, TrainedModel | Refusal] = field(default_factory=dict)

    def recipe(self, row: Row) -> Recipe | Refusal:
        """Return what computes a row, with a model that was trained for it if there is one."""
        return trained_recipe(row, self.trained) or recipe_of(row)

    def figures(
        self, setting: Setting, model: Model | None, names: Sequence[str]
    ) -> dict[str, dict[str, Any]]:
        """Return the figures of each set that is there, times 100.

        Args:
            setting: what to compute.
            model: None for word vectors.
            names: the sets asked for.

        Raises:
            WhitenIndexError: the model, the transform or the data cannot be used.
        """
        if setting.measure is Measure.STS:
            return self._sts(setting, model, names)
        if setting.measure is Measure.RETRIEVAL:
            assert model is not None
            return {name: self._retrieval(setting, model) for name in names}
        found = {}
        for name in names:
            task = self.data.task(name)
            if task is not None:
                found[name] = self._task(setting, model, task)
        return found

    def config(self, setting: Setting, model: Model | None) -> EvalConfig:
        """Return the evaluation of a setting, as ``eval`` would make it of its options."""
        if model is None:
            return EvalConfig()
        config = EvalConfig(encoder=model.encoder(setting), store=str(self.work / "nli"))
        if setting.k is None:
            return config
        whitening = WhiteningConfig(kind=Transform.WHITENING, k=model.width(setting.k))
        fit = str(self.files.nli) if setting.fit == NLI else setting.fit
        return replace(config, transforms=(whitening,), fit=fit)

    def embedder(self, setting: Setting, model: Model) -> TextEmbedder:
        """Return what gives a setting's embeddings, of states encoded once."""
        names = ["RTE"] if setting.measure is Measure.RTE else _TRANSFER_SETS
        return self.encoders.states(model, setting, names).embedder(setting.layers)

    def words(self, setting: Setting) -> WordAverages:
        """Return the averages of word vectors of a setting."""
        if not setting.sif:
            return WordAverages(self._vectors)
        return WordAverages(self._vectors, read_sif_weights(Path(str(self.files.word_counts))))

    @cached_property
    def _vectors(self) -> Vectors:
        """Vectors of the words of every text, read once."""
        texts = self.data.texts(Measure.STS, [])
        texts += self.data.texts(Measure.TRANSFER, _TRANSFER_SETS)
        words = {word for text in texts for word in tokenize(text)}
        return read_vectors(Path(str(self.files.word_vectors)), words)

    def key(
        self, setting: Setting, model: Model | None, sets: Sequence[StsSet | Task]
    ) -> dict[str, Any]:
        """Return all that figures depend on."""
        transform = (
            None
            if setting.k is None or model is None
            else {"k": model.width(setting.k), "fit": setting.fit}
        )
        files = [self.files.nli] if setting.fit == NLI else []
        if model is None:
            files = [self.files.word_vectors, self.files.word_counts if setting.sif else None]
        return {
            "measure": setting.measure.value,
            "encoder": self.encoder_key(setting, model),
            "transform": transform,
            "files": [file_identity(file) for file in files],
            "sets": [self.data.digest(each) for each in sets],
        }

    def encoder_key(self, setting: Setting, model: Model | None) -> str:
        """Return the fingerprint of a setting's embeddings; words say whether they are SIF's."""
        if model is None:
            return "sif" if setting.sif else "words"
        return resolve_encoder(model.encoder(setting))[0].fingerprint

    def _sts(
        self, setting: Setting, model: Model | None, names: Sequence[str]
    ) -> dict[str, dict[str, Any]]:
        sets = [each for each in self.data.sets() if not names or each.name in names]
        if not sets:
            return {}

        def make() -> dict[str, Any]:
            if model is None:
                averages = self.words(setting)
                scores = {
                    each.name: word_scores(each, averages, remove_common=setting.sif)
                    for each in sets
                }
                return {"datasets": scores}
            embedder = None if model.once else self.embedder(setting, model)
            config, watcher = self.config(setting, model), self.encoders.stages.watcher
            found = evaluate_sts(config, sets, embedder=embedder, progress=watcher)
            return {"datasets": found["datasets"]}

        kept = self.kept.get(self.key(setting, model, sets), make)
        return {name: dict(each["spearman"]) for name, each in kept["datasets"].items()}

    def _task(self, setting: Setting, model: Model | None, task: Task) -> dict[str, Any]:
        def make() -> dict[str, Any]:
            embedder: TextEmbedder | None = None
            if model is None:
                embedder = self.words(setting)
            elif not model.once:
                embedder = self.embedder(setting, model)
            config, watcher = self.config(setting, model), self.encoders.stages.watcher
            if setting.measure is Measure.RTE:
                found = evaluate_entailment(config, task, embedder=embedder, progress=watcher)
            else:
                found = evaluate_transfer(config, [task], embedder=embedder, progress=watcher)
            return dict(found["datasets"][task.name])

        kept = self.kept.get(self.key(setting, model, [task]), make)
        names = ("deviation", "majority", "notes")
        return {"ours": kept["accuracy"], **{n: kept[n] for n in names if kept.get(n) is not None}}

    def _retrieval(self, setting: Setting, model: Model) -> dict[str, Any]:
        folder = str(self.files.quora)

        def make() -> dict[str, Any]:
            wanted = {**vars(self.config(setting, model)), "store": str(self.work / "store")}
            config = RetrievalConfig(**wanted, sets=(folder,), metrics=(_MRR,))
            found = evaluate_retrieval(config, progress=self.encoders.stages.watcher)
            return dict(next(iter(found["datasets"].values())))

        key = {**self.key(setting, model, []), "set": file_identity(folder)}
        # The published figure is a share of 1.
        return {"ours": self.kept.get(key, make)[_MRR] / 100}
