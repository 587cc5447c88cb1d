"""Configuration of an evaluation of retrieval: sets, what searches them, metrics."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from whiten_index.artifacts.files import is_folder, list_folder, resolved
from whiten_index.errors import ConfigError
from whiten_index.evaluation.beir import is_set
from whiten_index.evaluation.metrics import parse_metric
from whiten_index.evaluation.trec_run import RUN_ENDINGS, check_run_path
from whiten_index.measure.eval_config import OF_OPENING, VARIABLE, EvalConfig, changed
from whiten_index.measure.measure_options import TARGET, RetrievalOptions
from whiten_index.options import options_of, schema
from whiten_index.pipeline.build_config import BuildConfig
from whiten_index.whitening.whitening_config import WhiteningConfig

_OF_BUILDS = ("text_columns", "id_column", "row_filter", "factory")


@schema
class RetrievalConfig(RetrievalOptions):
    """The sets to search, what searches them, and how it is judged.

    Attributes:
        base: encoder, transforms, store, or a published index; its fit is the corpus of each set.
        sets: folders in BEIR form.
        corpus, queries, qrels: or the files of one set, a corpus as ``BuildConfig`` takes it.
        qrels_split: which judgements, where a file has a column of it; ``test`` for folders.
        text_columns: of the corpus; title and text, those there are, where they are left out.
        id_column: of the corpus; ``id``, or BEIR's ``_id``.
        row_filter: condition that documents must pass.
        run: run file to judge, in the place of a search.
        run_out: file or folder that the rankings are written to.
        metrics: such as ``ndcg@10``; as many hits are searched for as the deepest counts.
        factory: FAISS factory string of the indexes that are built.
        drop_self: leave out hits with the query's own id; None is decided by the judgements.
    """

    base: EvalConfig = EvalConfig()
    sets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _ = self.depth
        self._require_source()
        if self.base.fit != TARGET:
            raise ConfigError(
                "--fit is for pairs of sentences; retrieval searches indexes as a build makes "
                "them, fitted on their corpus: leave it out"
            )
        self._require_used()
        self._require_place()
        for transform in self.base.transforms or (None,):
            # What a build would refuse is refused before the first of them.
            self.build_config(transform, corpus=("corpus",), out="index", store="store")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> RetrievalConfig:
        """Read the options of the command line, by their names."""
        names = ("sets", *(each.name for each in options_of(cls)))
        own = {name: options[name] for name in names if options.get(name) is not None}
        return cls(base=EvalConfig.from_options(options), **own)

    @property
    def depth(self) -> int:
        """Hits a query that the metrics need."""
        return max(parse_metric(metric)[1] for metric in self.metrics)

    @property
    def builds(self) -> bool:
        """True if indexes are built; False if a published index or a run is judged."""
        return self.run is None and self.base.index is None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the sets: their folders'."""
        return tuple(resolved(each).name for each in self.sets) or (_name(str(self.qrels)),)

    @property
    def writes_one_run(self) -> bool:
        """True if the rankings go to one file, not to a folder of files."""
        return self.run_out is not None and Path(self.run_out).suffix in RUN_ENDINGS

    def run_path(self, name: str, transform: WhiteningConfig | None) -> Path | None:
        """Return where a ranking goes, None where it goes nowhere."""
        if self.run_out is None or self.writes_one_run:
            return None if self.run_out is None else Path(self.run_out)
        kind = "index" if self.base.index is not None else "raw"
        if transform is not None:
            kind = transform.kind.value + ("" if transform.k is None else f"-k{transform.k}")
        return Path(self.run_out) / f"{name}.{kind}.trec"

    def build_config(
        self, transform: WhiteningConfig | None, *, corpus: tuple[str, ...], out: str, store: str
    ) -> BuildConfig:
        """Return the build of an index of one corpus under one transform, None for none."""
        shape: dict[str, Any] = {"whiten": "none", "seed": self.base.seed}
        if transform is not None:
            shape = asdict(transform)
            shape["whiten"] = shape.pop("kind").value
        return BuildConfig(
            corpus=corpus,
            out=out,
            store=store,
            text_columns=self.text_columns or ("text",),
            id_column=self.id_column or "id",
            row_filter=self.row_filter,
            factory=self.factory,
            **vars(self.base.encoder),
            **shape,
        )

    def _require_source(self) -> None:
        """Refuse what does not say one thing to search and one thing to judge it by."""
        searched = {"--run": self.run, "--index": self.base.index, "--corpus": self.corpus}
        if len(several := [name for name, value in searched.items() if value]) > 1:
            raise ConfigError(
                f"{' and '.join(several)} each say what is searched; give one of them"
            )
        files = {"--corpus": self.corpus, "--queries": self.queries, "--qrels": self.qrels}
        given = [name for name, value in files.items() if value]
        needed = {"--corpus": self.builds, "--queries": self.run is None, "--qrels": True}
        missing = [name for name, needs in needed.items() if needs and name not in given]
        if missing and not self.sets:
            raise ConfigError(
                f"no set is named, and no {' and no '.join(missing)}: name the folder of a set "
                f"(corpus, queries and qrels), or its files{_public_sets()}"
            )
        if self.sets and given:
            raise ConfigError(
                f"{' and '.join(given)} names the files of a set, and a folder of one is named "
                "too; give one of the two"
            )
        if len(set(self.names)) < len(self.names):
            raise ConfigError(f"two sets are named alike: {', '.join(self.names)}; rename a folder")
        if not self.builds and len(self.names) > 1:
            raise ConfigError(
                f"an index or a run is of one set, and {len(self.names)} are named; name the one"
            )

    def _require_used(self) -> None:
        """Refuse options of a build or a search that does not happen."""
        given = ["--whiten or --k"] if self.base.transforms else []
        given += changed(self.base, only=("store", "seed")) + changed(self, only=_OF_BUILDS)
        given += changed(self.base.encoder, without=OF_OPENING)
        if not self.builds and given:
            what = "an index" if self.run is None else "a run"
            raise ConfigError(
                f"{' and '.join(given)} says how to build, and {what} that is there is judged; "
                "leave it out"
            )
        given = changed(self, only=("queries",)) + changed(self.base.encoder, only=OF_OPENING)
        if self.run is not None and given:
            raise ConfigError(
                f"{' and '.join(given)} is for a search, and a run that is there is judged; leave "
                "it out"
            )

    def _require_place(self) -> None:
        if self.run_out is None:
            return
        if self.run is not None:
            raise ConfigError("--run-out writes what is searched, and --run is judged; give one")
        path = Path(self.run_out)
        if path.suffix and not is_folder(path):
            check_run_path(path)
        if self.writes_one_run and len(self.names) * max(1, len(self.base.transforms)) > 1:
            raise ConfigError(
                f"--run-out {self.run_out} is one file, and there are several runs to write; name "
                "a folder"
            )


def _public_sets() -> str:
    """Return the sets that a user could name, where the public ones are."""
    folder = Path(os.environ.get(VARIABLE, "")) / "retrieval"
    if not os.environ.get(VARIABLE) or not is_folder(folder):
        return ""
    sets = ", ".join(str(each) for each in list_folder(folder) if is_set(each))
    return f"; {VARIABLE} has {sets}" if sets else ""


def _name(qrels: str) -> str:
    """Return what a set is called by its file of judgements: its folder."""
    parent = resolved(qrels).parent
    return (parent.parent if parent.name == "qrels" else parent).name or Path(qrels).stem
