"""What a build is asked to do: one frozen configuration, checked when it is made."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.files import reading
from whiten_index.artifacts.limits import load_toml, read_bounded
from whiten_index.artifacts.paths import as_place, is_uri, require_no_secret, require_path, shown
from whiten_index.corpus import SHARD_ROWS, CorpusConfig, OnBadRow
from whiten_index.encoding import EncoderConfig, PassageConfig
from whiten_index.errors import ConfigError
from whiten_index.index import DEVICES, TARGET_RECALL, parse_bytes
from whiten_index.store import StoreDtype, require_dtype
from whiten_index.whitening import Estimator, Kind, Weighting, WhiteningConfig, parse_shrinkage
from whiten_index.whitening.selection import require_sample

Choice = TypeVar("Choice", bound=Enum)
AUTO = "auto"
# What ``auto`` does not take: these belong to a kind that is named.
_OF_A_KIND = ("groups", "group_size", "shuffle", "shrinkage", "remove_top")
_COUNTING_ESTIMATORS = (Estimator.LEDOIT_WOLF, Estimator.OAS)
_OF_AUTO = ("queries", "qrels", "qrels_split", "pairs")
RUNNERS = ("local", "ray")
_OF_RUNNER = ("runner", "address", "workers")
# What a user allows is asked for every time, and never read from a manifest.
_ALLOWED = ("trust_remote_code", "local_files_only")
_LISTS = ("corpus", "text_columns", "keep", "layers")
_OPTIONS = {"text_column": "text_columns", "filter": "row_filter"}


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """Everything a build or an encode can be told; the names are those of the command line.

    Attributes:
        corpus: Parquet files, folders, globs or URIs; empty to build from a store alone.
        out: folder of the index, or its URI in an object store; not needed to encode only.
        store: folder or URI of raw embeddings; ``out``/store where it is left out.
        text_columns: string columns, joined by a space.
        embedding_column: list column that takes the place of the encoder.
        id_column: string or integer column that names the rows.
        keep: metadata columns kept beside the index.
        row_filter: condition on columns such as ``lang == 'en'``.
        limit: use only the first so many rows.
        on_bad_row: blank (skip rows without content, stop at damaged ones), skip or error.
        shard_rows: rows a shard at most.
        model, revision, pooling, layers, max_length, dtype, device, threads,
            document_prompt, query_prompt, document_prompt_name, query_prompt_name,
            trust_remote_code, local_files_only, code_revision: see ``EncoderConfig``. With an
            embedding column, ``model`` names the encoder of the queries.
        passage_tokens: cut texts into passages of so many tokens at most; see ``PassageConfig``.
        overlap: tokens that neighbouring passages share at most; 0 where it is left out.
        store_dtype: float16, float32 or own; the default is float16, or own for a column.
        whiten: ``auto``, which chooses k, exponent and centring, or one of the kinds of transform.
        k, exponent, center, normalize_input, groups, group_size, shuffle, shrinkage, floor,
            remove_top: see ``WhiteningConfig``; with ``auto`` what is given is not chosen.
        queries, qrels, qrels_split: files of judged queries that ``auto`` chooses by, and which of
            the judgements' splits where they have a column of it.
        pairs: file of pairs of texts that ``auto`` chooses by.
        choose_sample: documents at most that ``auto`` chooses on where there are no labels.
        weight_column: numeric column of frequencies by which rows count in the fit.
        weighting: ``zipfian``, in proportion to the frequencies, or ``inverse-frequency``.
        factory: FAISS factory string of the index proper, or ``auto``.
        target_recall: index recall that searching is set to, on vectors held out, and that ``auto``
            chooses the index by.
        memory_budget: bytes that the index may hold in memory, such as ``4GiB``, and that making
            it takes; None for as many as it takes. With little, embeddings of a column are read one
            shard at a time; an encoder's own memory does not count.
        index_device: where the index is made: ``auto``, ``cpu`` or ``gpu``.
        seed: of every sample drawn, and of random directions and groups.
        runner: ``local``, or ``ray`` for workers on a cluster.
        address: of the cluster's head, None for the one that Ray finds, or one started here.
        workers: on the cluster, None for one a GPU, or one a machine without GPUs.
    """

    corpus: tuple[str, ...] = ()
    out: str | None = None
    store: str | None = None
    text_columns: tuple[str, ...] = ()
    embedding_column: str | None = None
    id_column: str | None = None
    keep: tuple[str, ...] = ()
    row_filter: str | None = None
    limit: int | None = None
    on_bad_row: str = "blank"
    shard_rows: int = SHARD_ROWS
    model: str | None = None
    revision: str | None = None
    pooling: str | None = None
    layers: tuple[int, ...] | None = None
    max_length: int | None = None
    dtype: str = "float32"
    device: str = "auto"
    threads: int | None = None
    document_prompt: str | None = None
    query_prompt: str | None = None
    document_prompt_name: str | None = None
    query_prompt_name: str | None = None
    trust_remote_code: bool = False
    local_files_only: bool = False
    code_revision: str | None = None
    passage_tokens: int | None = None
    overlap: int | None = None
    store_dtype: str | None = None
    whiten: str = AUTO
    k: str | int | float | None = None
    exponent: float | None = None
    center: bool | None = None
    normalize_input: bool = False
    groups: int | None = None
    group_size: int | None = None
    shuffle: bool = False
    shrinkage: str | float | None = None
    floor: float | None = None
    remove_top: int | None = None
    queries: str | None = None
    qrels: str | None = None
    qrels_split: str | None = None
    pairs: str | None = None
    choose_sample: int = 1_000
    weight_column: str | None = None
    weighting: str = Weighting.ZIPFIAN.value
    factory: str = "auto"
    target_recall: float = TARGET_RECALL
    memory_budget: str | int | None = None
    index_device: str = "auto"
    seed: int = 0
    runner: str = "local"
    address: str | None = None
    workers: int | None = None

    def __post_init__(self) -> None:
        for name, expected in get_type_hints(BuildConfig).items():
            _require_type(name, getattr(self, name), expected)
            require_no_secret(getattr(self, name), what=_option(name))
        for name in ("corpus", "text_columns", "keep"):
            given = getattr(self, name)
            listed = (given,) if isinstance(given, str | Path) else given
            object.__setattr__(self, name, tuple(map(str, listed)))
        if self.layers is not None:
            object.__setattr__(self, "layers", tuple(self.layers))
        for path in self.corpus:
            require_path(path, what="the corpus")
        for name in ("out", "store"):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, as_place(given, what=_option(name)))
        if self.out is None and self.store is None:
            raise ConfigError("say where the result goes: --out for an index, --store to encode")
        if not self.corpus and self.store is None:
            raise ConfigError("name a corpus to read, or with --store a folder of embeddings")
        self._require_consistent_whitening()
        self._require_sound_index()
        self._require_known_runner()
        _member(OnBadRow, self.on_bad_row, "--on-bad-row")
        require_dtype(self.store_dtype, own=False)
        self.passage_config()
        if self.threads is not None:
            EncoderConfig(threads=self.threads)
        if self.corpus:
            self.corpus_config()
            self.encoder_config()

    @property
    def store_path(self) -> Path:
        """Where the raw embeddings are; of those in a bucket the name only."""
        return Path(self.store) if self.store is not None else Path(str(self.out)) / "store"

    @property
    def store_place(self) -> Path | str:
        """Where the raw embeddings are: a path, or a URI."""
        place = f"{str(self.out).rstrip('/')}/store" if self.store is None else self.store
        return place if is_uri(place) else self.store_path

    @property
    def out_place(self) -> Path | str:
        """Where the index goes: a path, or a URI."""
        return str(self.out) if is_uri(str(self.out)) else Path(str(self.out))

    def corpus_config(self) -> CorpusConfig:
        """Return what the corpus is opened with."""
        passages = self.passage_config()
        return CorpusConfig(
            sources=self.corpus,
            text_columns=self.text_columns,
            embedding_column=self.embedding_column,
            id_column=self.id_column,
            keep=self._kept_columns(),
            row_filter=self.row_filter,
            limit=self.limit,
            on_bad_row=_member(OnBadRow, self.on_bad_row, "--on-bad-row"),
            shard_rows=self.shard_rows,
            passages=None if passages is None else (passages.tokens, passages.overlap),
        )

    def _kept_columns(self) -> tuple[str, ...]:
        """Return the columns kept beside the index; the weights are found there again."""
        if self.weight_column is None or self.weight_column in (*self.keep, self.id_column):
            return self.keep
        return (*self.keep, self.weight_column)

    def encoder_config(self) -> EncoderConfig:
        """Return what the encoder is resolved with."""
        names = EncoderConfig.__dataclass_fields__
        return EncoderConfig(**{name: getattr(self, name) for name in names})

    def passage_config(self) -> PassageConfig | None:
        """Return how texts are cut into passages, None where they stay whole."""
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
        """Whether the transform is chosen, not named."""
        return self.whiten == AUTO

    def whitening_config(self) -> WhiteningConfig:
        """Return what the whitening is fitted with, where it is chosen as far as it is settled."""
        names = WhiteningConfig.__dataclass_fields__.keys() - {"kind"}
        kind = Kind.WHITENING if self.chooses else _member(Kind, self.whiten, "--whiten", AUTO)
        return WhiteningConfig(kind=kind, **{name: getattr(self, name) for name in names})

    def weights_of(self) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
        """Return what turns frequencies (n,) into weights (n,) of mean 1."""
        return _member(Weighting, self.weighting, "--weighting").function

    @property
    def budget(self) -> int | None:
        """Bytes that the index may hold in memory, None for as many as it takes."""
        return None if self.memory_budget is None else parse_bytes(self.memory_budget)

    def _require_sound_index(self) -> None:
        if not 0 < self.target_recall <= 1:
            raise ConfigError(
                f"--target-recall takes a share above 0, at most 1, such as 0.95; "
                f"{self.target_recall} was given"
            )
        if self.index_device not in DEVICES:
            raise ConfigError(
                f"--index-device {self.index_device!r} is unknown; use {', '.join(DEVICES)}"
            )
        parse_bytes(1 if self.memory_budget is None else self.memory_budget)

    def _require_consistent_whitening(self) -> None:
        self.weights_of()
        if self.weight_column is None and self.weighting != Weighting.ZIPFIAN.value:
            raise ConfigError(
                f"--weighting {self.weighting} needs frequencies; name their column with "
                "--weight-column"
            )
        given = [_option(name) for name in _OF_A_KIND if getattr(self, name)]
        if self.chooses and given:
            raise ConfigError(
                f"{' and '.join(given)} belongs to a transform that is named, and --whiten auto "
                "chooses one; name it with --whiten, or leave the option out"
            )
        self.whitening_config()
        if self.chooses:
            require_sample(self.choose_sample)
        elif self.choose_sample != BuildConfig.choose_sample:
            raise ConfigError(
                f"--choose-sample {self.choose_sample} says how to choose, and --whiten "
                f"{self.whiten} leaves nothing to choose; leave it out"
            )
        estimator = parse_shrinkage(self.shrinkage)[0]
        if self.weight_column is not None and estimator in _COUNTING_ESTIMATORS:
            raise ConfigError(
                f"--shrinkage {self.shrinkage} counts rows, which weights are not; give a "
                "coefficient from 0 to 1, or leave --weight-column out"
            )
        given = [_option(name) for name in _OF_AUTO if getattr(self, name) is not None]
        if not self.chooses and given:
            raise ConfigError(
                f"{' and '.join(given)} can only tell how to choose, and --whiten {self.whiten} "
                "leaves nothing to choose; use --whiten auto, or leave the option out"
            )

    def _require_known_runner(self) -> None:
        if self.runner not in RUNNERS:
            raise ConfigError(f"--runner {self.runner!r} is unknown; use {', '.join(RUNNERS)}")
        given = [f"--{name}" for name in ("address", "workers") if getattr(self, name) is not None]
        if self.runner != "ray" and given:
            raise ConfigError(
                f"{' and '.join(given)} belongs to a cluster; add --runner ray, or leave it out"
            )
        if self.address == "":
            raise ConfigError(
                "--address is empty; name the head of the cluster, host:port, or leave it out"
            )
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"--workers takes 1 or more; {self.workers} was given")

    def dtype_kept(self) -> StoreDtype:
        """Return how embeddings are kept."""
        return require_dtype(self.store_dtype, own=self.embedding_column is not None)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, but for who did the work and what the user allowed."""
        left_out = (*_OF_RUNNER, *_ALLOWED)
        return {name: value for name, value in asdict(self).items() if name not in left_out}


def read_toml(path: Path) -> dict[str, Any]:
    """Read a job file; its keys come with underscores for dashes.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or sets one thing twice.
    """
    try:
        with reading(path):
            values = load_toml(read_bounded(path))
    except OSError as error:
        raise ConfigError(f"job file {path} cannot be read ({error}); check the path") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"job file {path} is not UTF-8 ({error}); save it as UTF-8") from error
    except ValueError as error:
        raise ConfigError(f"job file {path} is not TOML ({error}); mend that line") from error
    require_no_secret(values, what=f"job file {path}")
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name in found:
            twice = " and ".join(each for each in values if each.replace("-", "_") == name)
            raise ConfigError(f"job file {path} sets {twice}, which are the same; leave one out")
        found[name] = value
    return found


def read_job(path: Path, *, also: Collection[str] = ()) -> dict[str, Any]:
    """Read a job file: TOML whose keys are the fields above or the spelling of the options.

    Args:
        path: the file.
        also: names that may be set beside them.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or sets something unknown.
    """
    job: dict[str, Any] = {}
    for key, value in read_toml(path).items():
        name = _OPTIONS.get(key, key)
        if name in job:
            raise ConfigError(f"job file {path} sets {name} twice, once as {key}; leave one out")
        if name in also:
            job[name] = value
            continue
        if name not in BuildConfig.__dataclass_fields__:
            known = ", ".join(sorted({*BuildConfig.__dataclass_fields__, *also}))
            raise ConfigError(f"job file {path} sets {key!r}, which is unknown; known are {known}")
        many = name in _LISTS and not isinstance(value, list)
        job[name] = [value] if many else value
    return job


def _require_type(name: str, value: object, expected: Any) -> None:
    """Refuse a value that a job file or a caller gave in another type than the field's."""
    allowed = get_args(expected) or (expected,)
    plain = tuple(get_origin(kind) or kind for kind in allowed if kind is not Ellipsis)
    if name in _LISTS:
        plain = (str, Path, list, tuple, type(None))
    fits = isinstance(value, plain) or (float in plain and isinstance(value, int))
    if not fits or (isinstance(value, bool) and bool not in plain):
        kinds = " or ".join(kind.__name__ for kind in plain if kind is not type(None))
        raise ConfigError(f"{_option(name)} takes {kinds}; {shown(value)} was given")
    if name in _LISTS and isinstance(value, list | tuple):
        kind, called = (int, "numbers") if name == "layers" else (str | Path, "texts")
        if any(not isinstance(each, kind) or isinstance(each, bool) for each in value):
            raise ConfigError(f"{_option(name)} takes {called}; {shown(value)} was given")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _member(choices: type[Choice], name: str, option: str, *more: str) -> Choice:
    try:
        return choices(name)
    except ValueError as error:
        known = ", ".join([*more, *(str(choice.value) for choice in choices)])
        raise ConfigError(f"{option} {name!r} is unknown; use {known}") from error
