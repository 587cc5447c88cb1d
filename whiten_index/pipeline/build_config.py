"""Options of a build and of an encode."""

import shlex
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from whiten_index.corpus.corpus_config import CorpusConfig
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.errors import ConfigError
from whiten_index.index.choice import IndexPlan, choose_factory
from whiten_index.options import flag_of, options_of, parse_bytes, parse_seconds, schema
from whiten_index.paths import as_place, require_path
from whiten_index.pipeline.build_options import BuildOptions, EncodeOptions
from whiten_index.store.dtypes import StoreDtype
from whiten_index.whitening.whitening_config import Kind, WhiteningConfig

_Part = TypeVar("_Part")

AUTO = "auto"
# Options that belong to a named transform; ``auto`` does not take them.
_NAMED_TRANSFORM_OPTIONS = ("shrinkage", "remove_top")
_LABEL_OPTIONS = ("queries", "qrels", "qrels_split")
_RUNNER_OPTIONS = ("address", "workers")
# Not recorded: the resources that did the work, and permissions, which are never read from a file.
_NOT_RECORDED = (
    "runner", "address", "workers", "trust_remote_code", "local_files_only", "force", "base_url",
    "price", "max_cost",
)  # fmt: skip


@schema
class BuildConfig(BuildOptions):
    """Options of a build or an encode; the names are those of the command line.

    With an embedding column, ``model`` names the encoder of the queries.

    Raises:
        ConfigError: a value is out of bounds, or options do not go together.

    Examples:
        >>> BuildConfig(corpus="docs.parquet", text_columns="text", out="index", k=128).store_place
        PosixPath('index/store')
    """

    def __post_init__(self) -> None:
        EncoderConfig.__post_init__(self)
        for path in self.corpus:
            require_path(path, what="the corpus")
        for name in ("out", "store"):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, str(as_place(given, what=flag_of(name))))
        if self.out is None and self.store is None:
            raise ConfigError("say where the result goes: --store, or of a build --out")
        if not self.corpus and self.store is None:
            raise ConfigError("name a corpus to read, or with --store a folder of embeddings")
        self._require_consistent_transform()
        _ = self.budget, parse_seconds(self.max_latency)
        if self.runner != "ray":
            self._refuse(_RUNNER_OPTIONS, "belongs to a cluster; add --runner ray, or leave it out")
        elif self.remote:
            raise ConfigError(
                f"--runner ray shares work among machines, and {self.model} runs behind an API, "
                "whose limits one process keeps; leave --runner out"
            )
        if self.remote and self.passage_tokens is not None:
            raise ConfigError(
                f"--passage-tokens cuts by the tokenizer of a model, and {self.model} runs behind "
                "an API; cut the texts into shorter rows, or leave it out"
            )
        if self.address == "":
            raise ConfigError(
                "--address is empty; name the head of the cluster, host:port, or leave it out"
            )
        _ = self.passages
        if self.corpus:
            self.corpus_config()

    @property
    def store_place(self) -> Path | str:
        """Path or URI of the raw embeddings."""
        return as_place(self.store or f"{str(self.out).rstrip('/')}/store", what="--store")

    @property
    def out_place(self) -> Path | str:
        """Path or URI of the index."""
        return as_place(str(self.out), what="--out")

    def corpus_config(self) -> CorpusConfig:
        """Return the part that opens the corpus."""
        return self._part(CorpusConfig, sources=self.corpus, passages=self.passages)

    def encoder_config(self) -> EncoderConfig:
        """Return the part that resolves the encoder."""
        return self._part(EncoderConfig)

    @property
    def passages(self) -> tuple[int, int] | None:
        """Tokens of a passage, and those that neighbours share; ``None`` if texts stay whole."""
        if self.passage_tokens is None:
            if self.overlap is not None:
                raise ConfigError(
                    f"--overlap {self.overlap} is shared by passages, and texts stay whole; add "
                    "--passage-tokens, or leave --overlap out"
                )
            return None
        return self.passage_tokens, self.overlap or 0

    @property
    def chooses(self) -> bool:
        """True if the transform is chosen, not named."""
        return self.whiten == AUTO

    def whitening_config(self) -> WhiteningConfig:
        """Return the part that fits the transform, with what ``auto`` leaves settled."""
        kind = Kind.WHITENING if self.chooses else Kind(self.whiten)
        similarity = "dot" if self.similarity == "dot" else "cosine"
        return self._part(WhiteningConfig, kind=kind, similarity=similarity)

    def settled(self, encoder: Mapping[str, Any]) -> "BuildConfig":
        """Return the options with the similarity that ``auto`` means for the encoder of a store.

        It is that of the model's configuration; cosine for another or an unknown one, and for an
        embedding column, whose vectors may have been scaled since. The dot product of vectors of
        unit length, as of a model that ends in a normalisation, is the cosine.
        """
        unit = bool(encoder.get("normalizes")) or self.normalize_input
        wanted = encoder.get("similarity") if self.similarity == "auto" else self.similarity
        return replace(self, similarity="dot" if wanted == "dot" and not unit else "cosine")

    def _part(self, made: type[_Part], **given: Any) -> _Part:
        names = made.__dataclass_fields__.keys() - given.keys()  # type: ignore[attr-defined]
        return made(**{name: getattr(self, name) for name in names}, **given)

    @property
    def budget(self) -> int | None:
        """Bytes that the index may hold in memory, ``None`` without a limit."""
        return None if self.memory_budget is None else parse_bytes(self.memory_budget)

    def _require_consistent_transform(self) -> None:
        named = f"--whiten {self.whiten} leaves nothing to choose"
        if self.chooses:
            self._refuse(
                _NAMED_TRANSFORM_OPTIONS,
                "belongs to a transform that is named, and --whiten auto chooses one; name it with "
                "--whiten, or leave the option out",
            )
        else:
            why = f"can only tell how to choose, and {named}; use --whiten auto, or leave it out"
            self._refuse(_LABEL_OPTIONS, why)
            if self.choose_sample != BuildConfig.choose_sample:
                raise ConfigError(f"--choose-sample {self.choose_sample} {why}")
        self.whitening_config()
        self.require_both()

    def _refuse(self, names: tuple[str, ...], why: str) -> None:
        if given := [flag_of(name) for name in names if getattr(self, name)]:
            raise ConfigError(f"{' and '.join(given)} {why}")

    def index_plan(self, *, rows: int, dim: int, k: int) -> IndexPlan:
        """Return the index to make for so many rows; see ``choose_factory``."""
        return choose_factory(
            self.factory,
            rows=rows,
            dim=dim,
            k=k,
            budget=self.budget,
            target_recall=self.target_recall,
            max_latency=parse_seconds(self.max_latency),
            seed=self.seed,
            device=self.index_device,
        )

    def command(self) -> str:
        """Return the build without those of its options that a point of a sweep decides."""
        words = ["whiten-index", "build", *self.corpus]
        own = {each.name for each in options_of(EncodeOptions)} | {"similarity", "seed"}
        for each in options_of(BuildOptions):
            value = getattr(self, each.name)
            if each.name in own and value not in (each.default, None):
                if each.commas:
                    value = ",".join(map(str, value))
                for one in value if isinstance(value, tuple) else [value]:
                    words += [each.flag] if one is True else [each.flag, str(one)]
        return shlex.join(words)

    def dtype_kept(self) -> StoreDtype:
        """Return the type of the stored embeddings."""
        own = self.embedding_column is not None
        return StoreDtype(self.store_dtype or ("own" if own else "float16"))

    def to_json(self) -> dict[str, Any]:
        """Return the recorded fields as JSON values."""
        return {name: value for name, value in asdict(self).items() if name not in _NOT_RECORDED}
