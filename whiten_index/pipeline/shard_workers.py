"""Who encodes: the work on shards with its encoder, and the runner that does it."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from whiten_index.artifacts.manifest import fingerprint
from whiten_index.corpus import SHARD_BYTES, ParquetCorpus, Shard
from whiten_index.encoding import (
    EncoderConfig,
    EncoderSpec,
    PassageSplitter,
    chosen_devices,
    resolve_encoder,
)
from whiten_index.errors import ConfigError, CorpusError, EncoderError
from whiten_index.pipeline.build_config import BuildConfig
from whiten_index.pipeline.shard_encoding import ShardWork, Window, WindowResult
from whiten_index.runners import (
    Calls,
    CrewCalls,
    LocalRunner,
    ProcessRunner,
    RayRunner,
    Runner,
    SetAside,
    Slot,
    reason,
    refusal,
)
from whiten_index.store import EmbeddingStore

if TYPE_CHECKING:
    from whiten_index.encoding import Encoder

# Five shards of given embeddings at a time, each as read and as kept.
_ROOM_TO_OVERLAP = 10 * SHARD_BYTES


class EncoderSource:
    """Loads an encoder on first need; pickled, it is one that has loaded nothing yet."""

    def __init__(self, config: EncoderConfig, *, expected: str | None = None) -> None:
        """Take what the encoder is resolved with, and the fingerprint that it must have."""
        self._config, self._expected = config, expected
        self._encoder: Encoder | None = None

    def __call__(self) -> Encoder:
        """Return the encoder, the same one every time.

        Raises:
            EncoderError: it is not the one expected, as on a machine with another model.
        """
        if self._encoder is None:
            from whiten_index.encoding import Encoder

            spec, folder = resolve_encoder(self._config)
            if self._expected not in (None, spec.fingerprint):
                raise EncoderError(
                    f"the model {spec.model} on {platform.node()} differs from that of the machine "
                    "the build was started on; put the same one on all machines"
                )
            self._encoder = Encoder(spec, folder, self._config)
        return self._encoder

    def on(self, *, device: str, threads: int) -> EncoderSource:
        """Return the same encoder for a device; ``threads`` give way to those asked for."""
        config = replace(self._config, device=device, threads=self._config.threads or threads)
        return EncoderSource(config, expected=self._expected)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(EncoderSource, expected=self._expected), (self._config,)


def devices_of(config: BuildConfig, corpus: ParquetCorpus, calls: Calls) -> Sequence[str]:
    """Return what encodes: on a cluster one kind for all, else each device of this machine."""
    if corpus.dim is not None:
        return ("cpu",)
    if isinstance(calls, CrewCalls):
        return ("cuda",) if calls.crew.gpu else ("cpu",)
    return chosen_devices(config.encoder_config().device)


def window_results(
    corpus: ParquetCorpus,
    runner: Runner,
    windows: Sequence[Window],
    advance: Callable[[int], None],
) -> Iterator[tuple[Window, WindowResult]]:
    """Yield each window and what came of it; one that was set aside is tried again by its shards.

    Raises:
        SetAsideError: at the end, where shards failed every time.
    """
    aside = list[tuple[Window, SetAside]]()
    for window, result in zip(windows, runner.map(windows, advance), strict=True):
        if isinstance(result, SetAside):
            aside.append((window, result))
        else:
            yield window, result
    singles = [(shard,) for window, _ in aside if len(window) > 1 for shard in window]
    failed = [each for each in aside if len(each[0]) == 1]
    for single, result in zip(singles, runner.map(singles, advance), strict=True):
        if isinstance(result, SetAside):
            failed.append((single, result))
        else:
            yield single, result
    if failed:
        raise refusal(_together(corpus, failed), what="shard")


def _together(
    corpus: ParquetCorpus, failed: Sequence[tuple[Window, SetAside]]
) -> list[tuple[str, int, SetAside]]:
    """Return names and counts of shards, neighbours that failed for one reason as one."""
    places = {shard: place for place, shard in enumerate(corpus.shards)}
    groups = list[tuple[list[Shard], SetAside]]()
    for (shard,), aside in sorted(failed, key=lambda each: places[each[0][0]]):
        before, same = groups[-1] if groups else ([], aside)
        follows = bool(before) and places[before[-1]] + 1 == places[shard]
        if follows and before[-1].file == shard.file and reason(same) == reason(aside):
            before.append(shard)
        else:
            groups.append(([shard], aside))
    return [(_name(corpus, shards), len(shards), aside) for shards, aside in groups]


def _name(corpus: ParquetCorpus, shards: Sequence[Shard]) -> str:
    """Return how an error calls neighbouring shards."""
    shard, first, last = shards[0], shards[0].spans[0], shards[-1].spans[-1]
    return (
        f"{corpus.files[shard.file].path}, row group {first.row_group} row {first.start} to row "
        f"group {last.row_group} row {last.stop - 1}"
    )


def runner_of(config: BuildConfig, work: ShardWork, devices: Sequence[str], calls: Calls) -> Runner:
    """Return who does the work: a crew, this process on one device, a process each on several."""
    if isinstance(calls, CrewCalls):
        return RayRunner(calls.crew, functools.partial(_work_for, work), events=calls.events)
    if len(devices) == 1:
        given = work.corpus.dim is not None
        little = config.budget is not None and config.budget < _ROOM_TO_OVERLAP
        return LocalRunner(work, one_by_one=given and little)
    threads = (config.threads or os.cpu_count() or 1) // len(devices)
    asked = at_commit(config.encoder_config(), work.store.encoder)
    return ProcessRunner(
        [
            replace(work, encoder=EncoderSource(replace(each, device=device)))
            for device in devices
            for each in [replace(asked, threads=max(threads, 1))]
        ]
    )


def _work_for(work: ShardWork, slot: Slot) -> ShardWork:
    """Return the work of a worker on a cluster: the plan stays with who started the build."""
    corpus = replace(work.corpus, shards=(), footers=())
    source = work.encoder
    if isinstance(source, EncoderSource):
        source = source.on(device="cuda" if slot.gpus else "cpu", threads=slot.cpus)
    return replace(work, corpus=corpus, encoder=source)


def shard_work(config: BuildConfig, corpus: ParquetCorpus, *, write: bool = True) -> ShardWork:
    """Return the work on one shard, the encoder settled but not loaded.

    Args:
        config: of the build.
        corpus: opened.
        write: make the store's folder; False to look only.
    """
    make = EmbeddingStore.create if write else EmbeddingStore
    if config.embedding_column is not None:
        encoder_json = column_encoder(config, corpus)
        identity = {key: encoder_json[key] for key in ("kind", "dim")}
        store = make(config.store_place, encoder_json, fingerprint(identity))
        known = encoder_json["query_encoder"]
        asked = config.encoder_config()
        queries = EncoderSource(at_commit(asked, known)) if known else _no_encoder
        return ShardWork(corpus, store, queries, config.dtype_kept())
    encoder_config = config.encoder_config()
    spec, folder = resolve_encoder(encoder_config)
    passages = config.passage_config()
    splitter = None if passages is None else PassageSplitter.load(spec, folder, passages)
    store = make(config.store_place, spec.to_json(), spec.fingerprint)
    source = EncoderSource(at_commit(encoder_config, store.encoder), expected=spec.fingerprint)
    return ShardWork(corpus, store, source, config.dtype_kept(), splitter=splitter)


def column_encoder(config: BuildConfig, corpus: ParquetCorpus) -> dict[str, Any]:
    """Return what stands for the encoder of an embedding column.

    ``query_encoder`` is the model that queries are encoded with, where the user named one.
    """
    query: EncoderSpec | None = None
    if config.model is not None:
        query, _ = resolve_encoder(config.encoder_config())
        if query.dim != corpus.dim:
            raise CorpusError(
                f"column {config.embedding_column} holds {corpus.dim}-dim embeddings and "
                f"{config.model} gives {query.dim}; name the model they were made with"
            )
    return {
        "kind": "column",
        "column": config.embedding_column,
        "dim": corpus.dim,
        "query_encoder": None if query is None else query.to_json(),
    }


def at_commit(config: EncoderConfig, encoder: Mapping[str, Any]) -> EncoderConfig:
    """Return a configuration with the hub's commits it was resolved to: a branch may move on."""
    found = {name: encoder.get(name) for name in ("revision", "code_revision")}
    commits = {name: each for name, each in found.items() if each not in (None, "embedded")}
    return replace(config, **commits)


def _no_encoder() -> Encoder:
    raise ConfigError(
        "texts are to be encoded beside a column of embeddings; name the model they were made with "
        "by --model"
    )
