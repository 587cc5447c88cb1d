"""Options of a build and of an encode."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from whiten_index.corpus.corpus_config import CorpusConfig
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.encoding.passages import PassageConfig
from whiten_index.errors import ConfigError
from whiten_index.index.choice import parse_bytes
from whiten_index.options import flag_of, schema
from whiten_index.paths import as_place, is_uri, require_path
from whiten_index.pipeline.build_options import BuildOptions
from whiten_index.store.dtypes import StoreDtype
from whiten_index.whitening.whitening_config import (
    Kind,
    WhiteningConfig,
    parse_shrinkage,
)

AUTO = "auto"
# Options that belong to a named transform; ``auto`` does not take them.
_NAMED_TRANSFORM_OPTIONS = ("groups", "group_size", "shuffle", "shrinkage", "remove_top")
_ROW_COUNTING_ESTIMATORS = ("ledoit-wolf", "oas")
_SELECTION_OPTIONS = ("queries", "qrels", "qrels_split", "pairs")
_RUNNER_OPTIONS = ("address", "workers")
# Not recorded: the resources that did the work, and permissions, which are never read from a file.
_NOT_RECORDED = ("runner", "address", "workers", "trust_remote_code", "local_files_only")


@schema
class BuildConfig(BuildOptions):
    """Options of a build or an encode; the names are those of the command line.

    With an embedding column, ``model`` names the encoder of the queries.

    Raises:
        ConfigError: a value is out of bounds, or options do not go together.

    Example:
        >>> BuildConfig(corpus="docs.parquet", text_columns="text", out="index", k=128).store_place
        PosixPath('index/store')
    """

    def __post_init__(self) -> None:
        EncoderConfig.__post_init__(self)
        for path in self.corpus:
            require_path(path, what="the corpus")
        for name in ("out", "store"):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, as_place(given, what=flag_of(name)))
        if self.out is None and self.store is None:
            raise ConfigError("say where the result goes: --out for an index, --store to encode")
        if not self.corpus and self.store is None:
            raise ConfigError("name a corpus to read, or with --store a folder of embeddings")
        self._require_consistent_transform()
        parse_bytes(1 if self.memory_budget is None else self.memory_budget)
        self._require_consistent_runner()
        self.passage_config()
        if self.corpus:
            self.corpus_config()

    @property
    def store_place(self) -> Path | str:
        """Path or URI of the raw embeddings."""
        place = f"{str(self.out).rstrip('/')}/store" if self.store is None else self.store
        return place if is_uri(place) else Path(place)

    @property
    def out_place(self) -> Path | str:
        """Path or URI of the index."""
        place = str(self.out)
        return place if is_uri(place) else Path(place)

    def corpus_config(self) -> CorpusConfig:
        """Return the part that opens the corpus."""
        passages, keep = self.passage_config(), self.keep
        if self.weight_column is not None and self.weight_column not in (*keep, self.id_column):
            # Weights are read again from the columns that are kept.
            keep = (*keep, self.weight_column)
        return CorpusConfig(
            sources=self.corpus,
            text_columns=self.text_columns,
            embedding_column=self.embedding_column,
            id_column=self.id_column,
            keep=keep,
            row_filter=self.row_filter,
            limit=self.limit,
            on_bad_row=self.on_bad_row,
            shard_rows=self.shard_rows,
            passages=None if passages is None else (passages.tokens, passages.overlap),
        )

    def encoder_config(self) -> EncoderConfig:
        """Return the part that resolves the encoder."""
        names = EncoderConfig.__dataclass_fields__
        return EncoderConfig(**{name: getattr(self, name) for name in names})

    def passage_config(self) -> PassageConfig | None:
        """Return the part that cuts texts into passages, ``None`` if texts stay whole."""
        if self.passage_tokens is None:
            if self.overlap is not None:
                raise ConfigError(
                    f"--overlap {self.overlap} is shared by passages, and texts stay whole; add "
                    "--passage-tokens, or leave --overlap out"
                )
            return None
        return PassageConfig(self.passage_tokens, self.overlap or 0)

    @property
    def chooses(self) -> bool:
        """True if the transform is chosen, not named."""
        return self.whiten == AUTO

    def whitening_config(self) -> WhiteningConfig:
        """Return the part that fits the transform, with what ``auto`` leaves settled."""
        names = WhiteningConfig.__dataclass_fields__.keys() - {"kind"}
        kind = Kind.WHITENING if self.chooses else Kind(self.whiten)
        return WhiteningConfig(kind=kind, **{name: getattr(self, name) for name in names})

    @property
    def budget(self) -> int | None:
        """Bytes that the index may hold in memory, ``None`` without a limit."""
        return None if self.memory_budget is None else parse_bytes(self.memory_budget)

    def _require_consistent_transform(self) -> None:
        if self.weight_column is None and self.weighting != BuildConfig.weighting:
            raise ConfigError(
                f"--weighting {self.weighting} needs frequencies; name their column with "
                "--weight-column"
            )
        given = [flag_of(name) for name in _NAMED_TRANSFORM_OPTIONS if getattr(self, name)]
        if self.chooses and given:
            raise ConfigError(
                f"{' and '.join(given)} belongs to a transform that is named, and --whiten auto "
                "chooses one; name it with --whiten, or leave the option out"
            )
        self.whitening_config()
        if not self.chooses and self.choose_sample != BuildConfig.choose_sample:
            raise ConfigError(
                f"--choose-sample {self.choose_sample} says how to choose, and --whiten "
                f"{self.whiten} leaves nothing to choose; leave it out"
            )
        estimator = parse_shrinkage(self.shrinkage)[0]
        if self.weight_column is not None and estimator in _ROW_COUNTING_ESTIMATORS:
            raise ConfigError(
                f"--shrinkage {self.shrinkage} counts rows, which weights are not; give a "
                "coefficient from 0 to 1, or leave --weight-column out"
            )
        given = [flag_of(name) for name in _SELECTION_OPTIONS if getattr(self, name) is not None]
        if not self.chooses and given:
            raise ConfigError(
                f"{' and '.join(given)} can only tell how to choose, and --whiten {self.whiten} "
                "leaves nothing to choose; use --whiten auto, or leave the option out"
            )

    def _require_consistent_runner(self) -> None:
        given = [flag_of(name) for name in _RUNNER_OPTIONS if getattr(self, name) is not None]
        if self.runner != "ray" and given:
            raise ConfigError(
                f"{' and '.join(given)} belongs to a cluster; add --runner ray, or leave it out"
            )
        if self.address == "":
            raise ConfigError(
                "--address is empty; name the head of the cluster, host:port, or leave it out"
            )

    def dtype_kept(self) -> StoreDtype:
        """Return the type of the stored embeddings."""
        own = self.embedding_column is not None
        return StoreDtype(self.store_dtype or ("own" if own else "float16"))

    def to_json(self) -> dict[str, Any]:
        """Return the recorded fields as JSON values."""
        return {name: value for name, value in asdict(self).items() if name not in _NOT_RECORDED}
