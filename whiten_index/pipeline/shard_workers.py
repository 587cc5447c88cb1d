"""The work on shards of a corpus, its executor, and the shards that failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from whiten_index.artifacts.manifest import fingerprint
from whiten_index.corpus.parquet_corpus import ParquetCorpus
from whiten_index.corpus.sharding import SHARD_BYTES, Shard
from whiten_index.distributed.executors import Executor, Failure, SerialExecutor
from whiten_index.distributed.process_executor import ProcessExecutor
from whiten_index.distributed.ray_executor import RayExecutor
from whiten_index.encoding.devices import chosen_devices, window_factor
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.encoding.passages import PassageSplitter
from whiten_index.encoding.spec import EncoderSpec, resolve_encoder
from whiten_index.errors import ConfigError, CorpusError, PartialFailureError
from whiten_index.pipeline.build_config import BuildConfig
from whiten_index.pipeline.shard_encoding import LazyEncoder, ShardWork, Window, WindowResult
from whiten_index.store.embedding_store import EmbeddingStore

if TYPE_CHECKING:
    from whiten_index.encoding.encoder import Encoder

# Five shards of given embeddings at a time, each as read and as kept.
_BYTES_TO_OVERLAP = 10 * SHARD_BYTES
_NAMED = 5


def encoding_executor(
    config: BuildConfig, work: ShardWork, executor: Executor
) -> tuple[Executor, int]:
    """Return the executor that encodes, and the number of full shards in its windows.

    Workers of a cluster encode where there are any, else every device of this machine.
    """
    if isinstance(executor, RayExecutor):
        return executor, window_factor(executor.device)
    if work.corpus.dim is not None:
        tight = config.budget is not None and config.budget < _BYTES_TO_OVERLAP
        return SerialExecutor(one_by_one=tight), 1
    devices = chosen_devices(config.encoder_config().device)
    if len(devices) == 1:
        return executor, window_factor(devices[0])
    return ProcessExecutor(devices, threads=config.threads), window_factor(devices[0])


def window_results(
    work: ShardWork,
    executor: Executor,
    windows: Sequence[Window],
    advance: Callable[[int], None],
) -> Iterator[tuple[Window, WindowResult]]:
    """Yield each window and its result; one that failed is retried shard by shard.

    Raises:
        PartialFailureError: at the end, if shards failed again.
    """
    failed: list[Failure] = []
    for window, result in _results(work, executor, windows, advance, failed):
        yield window, result
    singles = [(shard,) for failure in failed for shard in failure.item]
    failed = []
    for window, result in _results(work, executor, singles, advance, failed):
        yield window, result
    if failed:
        raise _partial_failure(work.corpus, failed)


def _results(
    work: ShardWork,
    executor: Executor,
    windows: Sequence[Window],
    advance: Callable[[int], None],
    failed: list[Failure],
) -> Iterator[tuple[Window, WindowResult]]:
    """Yield results as they come, and collect failures."""
    for position, result in executor.map_unordered(work, windows, advance):
        if isinstance(result, Failure):
            failed.append(result)
        else:
            yield windows[position], result


def _partial_failure(corpus: ParquetCorpus, failed: Sequence[Failure]) -> PartialFailureError:
    """Return the error that names all failed shards; neighbours with one reason are one item."""
    places = {shard: place for place, shard in enumerate(corpus.shards)}
    groups = list[tuple[list[Shard], str]]()
    for failure in sorted(failed, key=lambda each: places[each.item[0]]):
        (shard,) = failure.item
        before, why = groups[-1] if groups else ([], "")
        follows = bool(before) and places[before[-1]] + 1 == places[shard]
        if follows and before[-1].file == shard.file and why == failure.reason:
            before.append(shard)
        else:
            groups.append(([shard], failure.reason))
    items = [
        {"name": _name(corpus, shards), "shards": len(shards), "why": why} for shards, why in groups
    ]
    shown = "; ".join(f"{each['name']}: {each['why']}" for each in items[:_NAMED])
    more = f"; and {len(items) - _NAMED} more places" if len(items) > _NAMED else ""
    counted = "1 shard" if len(failed) == 1 else f"{len(failed)} shards"
    return PartialFailureError(
        f"{counted} failed ({shown}{more}). All other shards are finished and kept: repair what is "
        "named, and run the same command again",
        items=items,
    )


def _name(corpus: ParquetCorpus, shards: Sequence[Shard]) -> str:
    """Return the name of neighbouring shards in an error."""
    shard, first, last = shards[0], shards[0].spans[0], shards[-1].spans[-1]
    return (
        f"{corpus.files[shard.file].path}, row group {first.row_group} row {first.start} to row "
        f"group {last.row_group} row {last.stop - 1}"
    )


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
        queries = LazyEncoder(at_commit(asked, known)) if known else _no_encoder
        return ShardWork(corpus, store, queries, config.dtype_kept())
    encoder_config = config.encoder_config()
    spec, folder = resolve_encoder(encoder_config)
    passages = config.passage_config()
    splitter = None if passages is None else PassageSplitter.load(spec, folder, passages)
    store = make(config.store_place, spec.to_json(), spec.fingerprint)
    source = LazyEncoder(at_commit(encoder_config, store.encoder), expected=spec.fingerprint)
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
