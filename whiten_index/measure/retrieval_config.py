"""What an evaluation of retrieval is asked: which sets, which index or run, which metrics."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.files import is_file, is_folder, list_folder, resolved
from whiten_index.corpus.parquet_corpus import ParquetCorpus
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.errors import ConfigError, CorpusError
from whiten_index.evaluation.beir import (
    id_column,
    is_set,
    parquet_corpus,
    qrels_file,
    queries_file,
    set_files,
    text_columns,
)
from whiten_index.evaluation.judgements import JudgedQueries, read_judged
from whiten_index.evaluation.metrics import parse_metric
from whiten_index.evaluation.trec_run import RUN_ENDINGS, check_run_path
from whiten_index.measure.eval_config import OF_OPENING, TARGET, VARIABLE, EvalConfig
from whiten_index.paths import require_no_secret
from whiten_index.pipeline.build_config import BuildConfig
from whiten_index.progress import Stages
from whiten_index.search.query_encoder import query_embeddings
from whiten_index.search.search_index import SearchIndex
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.whitening.whitening_config import WhiteningConfig

METRICS = ("ndcg@10", "recall@100", "mrr@10", "map@100")
_SPLIT = "test"


@dataclass(frozen=True, kw_only=True)
class RetrievalConfig:
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

    base: EvalConfig = field(default_factory=EvalConfig)
    sets: tuple[str, ...] = ()
    corpus: tuple[str, ...] = ()
    queries: str | None = None
    qrels: str | None = None
    qrels_split: str | None = None
    text_columns: tuple[str, ...] = ()
    id_column: str | None = None
    row_filter: str | None = None
    run: str | None = None
    run_out: str | None = None
    metrics: tuple[str, ...] = METRICS
    factory: str = "Flat"
    drop_self: bool | None = None

    def __post_init__(self) -> None:
        require_no_secret(vars(self), what="an option of an evaluation")
        if not self.metrics:
            raise ConfigError(f"no metric is named; use some such as {', '.join(METRICS)}")
        _ = self.depth
        self._require_source()
        self._require_one_set()
        self._require_built()
        self._require_searched()
        self._require_place()
        for transform in self.base.transforms or (None,):
            # What a build would refuse is refused before the first of them.
            self.build_config(transform, corpus=("corpus",), out="index", store="store")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> RetrievalConfig:
        """Read the options of the command line, by their names."""
        own = {f.name for f in fields(cls)} - {"base"}
        given = {name: value for name, value in options.items() if name in own}
        for name in ("sets", "corpus", "text_columns", "metrics"):
            given[name] = tuple(given.get(name) or ())
        given["metrics"] = given["metrics"] or METRICS
        return cls(base=EvalConfig.from_options(options), **given)

    @property
    def depth(self) -> int:
        """Hits a query that the metrics need."""
        return max(parse_metric(metric)[1] for metric in self.metrics)

    @property
    def split(self) -> str:
        """Which judgements of a folder count."""
        return self.qrels_split or _SPLIT

    @property
    def builds(self) -> bool:
        """Whether indexes are built, not an index or a run judged that is there."""
        return self.run is None and self.base.index is None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the sets: their folders'."""
        return tuple(resolved(each).name for each in self.sets) or (_name(str(self.qrels)),)

    @property
    def writes_one_run(self) -> bool:
        """Whether the rankings go to a file, not to a folder of them."""
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
        given = {"--run": self.run, "--index": self.base.index, "--corpus": self.corpus}
        several = [name for name, value in given.items() if value]
        if len(several) > 1:
            raise ConfigError(
                f"{' and '.join(several)} each say what is searched; give one of them"
            )
        wanted = {
            "--corpus": self.corpus or not self.builds,
            "--queries": self.queries or self.run,
            "--qrels": self.qrels,
        }
        missing = [name for name, value in wanted.items() if not value]
        if missing and not self.sets:
            raise ConfigError(
                f"no set is named, and no {' and no '.join(missing)}: name the folder of a set "
                f"(corpus, queries and qrels), or its files{_at_hand()}"
            )
        parts = {"--corpus": self.corpus, "--queries": self.queries, "--qrels": self.qrels}
        files = [name for name, value in parts.items() if value]
        if self.sets and files:
            raise ConfigError(
                f"{' and '.join(files)} names the files of a set, and a folder of one is named "
                "too; give one of the two"
            )

    def _require_one_set(self) -> None:
        if len(set(self.names)) < len(self.names):
            raise ConfigError(f"two sets are named alike: {', '.join(self.names)}; rename a folder")
        if not self.builds and len(self.names) > 1:
            raise ConfigError(
                f"an index or a run is of one set, and {len(self.names)} are named; name the one"
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

    def _require_built(self) -> None:
        """Refuse what can only be said of sentences, or of indexes that are built here."""
        base = self.base
        if base.fit != TARGET:
            raise ConfigError(
                "--fit is for pairs of sentences; retrieval searches indexes as a build makes "
                "them, fitted on their corpus: leave it out"
            )
        of_builds = {
            "--whiten or --k": bool(base.transforms),
            "--store": base.store is not None,
            "--text-column": bool(self.text_columns),
            "--id-column": self.id_column is not None,
            "--filter": self.row_filter is not None,
            "--factory": self.factory != RetrievalConfig.factory,
            "--seed": base.seed != EvalConfig.seed,
        }
        given = [name for name, value in of_builds.items() if value]
        given += [
            f"--{name.replace('_', '-')}"
            for name, value in vars(base.encoder).items()
            if name not in OF_OPENING and value != getattr(EncoderConfig, name)
        ]
        if not self.builds and given:
            what = "an index" if self.run is None else "a run"
            raise ConfigError(
                f"{' and '.join(given)} says how to build, and {what} that is there is judged; "
                "leave it out"
            )

    def _require_searched(self) -> None:
        """Refuse what only a search looks at."""
        of_searches = {
            "--queries": self.queries is not None,
            **{
                f"--{name.replace('_', '-')}": value != getattr(EncoderConfig, name)
                for name, value in self.base.opening.items()
            },
        }
        given = [name for name, value in of_searches.items() if value]
        if self.run is not None and given:
            raise ConfigError(
                f"{' and '.join(given)} is for a search, and a run that is there is judged; leave "
                "it out"
            )


def _at_hand() -> str:
    """Return what a user could name, where the public sets are."""
    folder = Path(os.environ.get(VARIABLE, "")) / "retrieval"
    if not os.environ.get(VARIABLE) or not is_folder(folder):
        return ""
    sets = ", ".join(str(each) for each in list_folder(folder) if is_set(each))
    return f"; {VARIABLE} has {sets}" if sets else ""


def _name(qrels: str) -> str:
    """Return what a set is called by its file of judgements: its folder."""
    parent = resolved(qrels).parent
    return (parent.parent if parent.name == "qrels" else parent).name or Path(qrels).stem


@dataclass(eq=False)
class RetrievalSet:
    """A set whose queries and judgements were read."""

    name: str
    judged: JudgedQueries
    corpus: tuple[str, ...]
    config: RetrievalConfig
    made_of: Mapping[str, str] = field(default_factory=dict)
    _embeddings: NDArray[np.float32] | None = field(default=None, repr=False)

    def embeddings(
        self, opened: SearchIndex, store: EmbeddingStore | None, stages: Stages
    ) -> NDArray[np.float32]:
        """Return the embeddings (q, d) of the queries, encoded once for all transforms."""
        if self._embeddings is None:
            texts = list(self.judged.texts.values())
            self._embeddings = query_embeddings(store, texts, opened.encode, stages)
        return self._embeddings


def read_sets(config: RetrievalConfig, work: Path) -> list[RetrievalSet]:
    """Read queries and judgements of all sets, before the corpus of one is encoded."""
    if not config.builds:
        qrels, split = judgements(config)
        queries = queries_file(Path(config.sets[0])) if config.sets else Path(str(config.queries))
        return [
            RetrievalSet(
                config.names[0],
                read_judged(queries, qrels, split=split),
                (),
                config,
            )
        ]
    if not config.sets:
        read = read_judged(str(config.queries), str(config.qrels), split=config.qrels_split)
        return [_with_corpus(config.names[0], read, config.corpus, config, work)]
    made = []
    for number, (name, folder) in enumerate(zip(config.names, config.sets, strict=True)):
        # A folder may be named by a link that is called as another one's.
        files = set_files(Path(folder), config.split, work=work / str(number))
        read = read_judged(files.queries, files.qrels, split=files.split)
        made_of = {str(files.corpus): str(files.source)}
        made.append(_with_corpus(name, read, tuple(made_of), config, work, made_of))
    return made


def judgements(config: RetrievalConfig) -> tuple[Path, str | None]:
    """Return the judgements of the one set, and which of their rows: None for all of them."""
    if config.sets:
        return qrels_file(Path(config.sets[0]), config.split)
    return Path(str(config.qrels)), config.qrels_split


def _with_corpus(
    name: str,
    judged: JudgedQueries,
    corpus: tuple[str, ...],
    config: RetrievalConfig,
    work: Path,
    made_of: Mapping[str, str] | None = None,
) -> RetrievalSet:
    files = {
        # Each in a folder of its own: files of one name must not replace each other.
        each: parquet_corpus(Path(each), work / str(number))
        for number, each in enumerate(corpus)
        if is_file(each)
    }
    made_of = made_of or {str(file): each for each, file in files.items()}
    if files.keys() == set(corpus):
        first = files[corpus[0]]
        # What was made of BEIR's JSON lines calls it id.
        of_lines = made_of[str(first)] != str(first)
        named = None if of_lines and config.id_column == "_id" else config.id_column
        config = replace(
            config,
            text_columns=config.text_columns or tuple(text_columns(first)),
            id_column=named or id_column(first),
        )
    # Folders, globs and URIs are a build's to open; their columns are named, or the usual ones.
    sources = tuple(str(files.get(each, each)) for each in corpus)
    build = config.build_config(None, corpus=sources, out="index", store="store")
    with naming(made_of):
        judged.require_any(map(str, ParquetCorpus.open(build.corpus_config()).ids()))
    return RetrievalSet(name, judged, sources, config, made_of)


@contextlib.contextmanager
def naming(made_of: Mapping[str, str]) -> Iterator[None]:
    """Let errors name the user's own file, not the one made of it, which is gone afterwards."""
    try:
        yield
    except (ConfigError, CorpusError) as error:
        said = str(error)
        for made, own in made_of.items():
            said = said.replace(made, own)
        if said == str(error):
            raise
        raise type(error)(said) from error
