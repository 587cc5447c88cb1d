"""The executor of a build: this process, or a cluster that shares its folders."""

from __future__ import annotations

import contextlib
import functools
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from whiten_index.artifacts.atomic import make_folder
from whiten_index.artifacts.files import exists, is_folder, list_folder, reading, writing
from whiten_index.corpus.sources import require_reachable
from whiten_index.distributed.cluster import cluster
from whiten_index.distributed.executors import Executor, SerialExecutor
from whiten_index.distributed.ray_executor import ClusterSize
from whiten_index.errors import CorpusError, StorageError
from whiten_index.paths import is_uri
from whiten_index.pipeline.build_config import BuildConfig
from whiten_index.progress import Stages

_PROBE, _SECONDS_A_DAY = ".tmp-shared-", 86_400.0


@contextlib.contextmanager
def executor_session(config: BuildConfig, stages: Stages) -> Iterator[tuple[BuildConfig, Executor]]:
    """Connect to the cluster that a configuration names for the block.

    Yields:
        The configuration with absolute paths, and the executor.

    Raises:
        ConfigError: Ray is not installed, or the cluster is too small.
        ClusterError: the cluster cannot be reached.
    """
    if config.runner != "ray":
        yield config, SerialExecutor()
        return
    config = with_absolute_paths(config)
    if config.embedding_column is not None:
        gpu: bool | None = False
    else:
        gpu = None if config.device == "auto" else config.device != "cpu"
    with (
        _shared_folders(config) as check,
        cluster(
            config.address,
            ClusterSize(workers=config.workers, gpu=gpu),
            check=check,
            note=stages.watcher.note,
        ) as executor,
    ):
        yield config, executor


def with_absolute_paths(config: BuildConfig) -> BuildConfig:
    """Return a configuration whose paths mean the same on all machines of its cluster."""
    if config.runner != "ray":
        return config
    model = config.model
    if model is not None and is_folder(model):
        model = str(Path(model).absolute())
    return replace(
        config,
        out=None if config.out is None else _absolute(config.out_place),
        store=None if config.store is None else _absolute(config.store_place),
        model=model,
    )


def _absolute(place: Path | str) -> str:
    """Return an absolute path; links are kept, which may lead elsewhere on another machine."""
    return place if isinstance(place, str) else str(place.absolute())


@contextlib.contextmanager
def _shared_folders(config: BuildConfig) -> Iterator[Callable[[], None]]:
    """Yield a check for workers: that they see the corpus, and may write the same folders."""
    token = uuid.uuid4().hex
    places = (config.out, config.store)
    folders = [Path(place) for place in places if place is not None and not is_uri(place)]
    sources = [
        source if is_uri(source) else str(Path(source).absolute())
        for source in config.corpus
        if is_uri(source) or exists(source)
    ]
    for folder in folders:
        _remove_old_probes(folder)
    probes = []
    try:
        for folder in folders:
            probe = folder / f"{_PROBE}{token}"
            with writing(probe, kept=""):
                make_folder(folder)
                probe.write_text(token)
            probes.append(probe)
        yield functools.partial(_require_shared, tuple(probes), token, tuple(sources))
    finally:
        for probe in probes:
            with contextlib.suppress(OSError):
                probe.unlink(missing_ok=True)


def _remove_old_probes(folder: Path) -> None:
    """Remove the probes of builds that were killed a day ago or longer."""
    for probe in list_folder(folder, f"{_PROBE}*"):
        with contextlib.suppress(OSError):
            if time.time() - probe.stat().st_mtime > _SECONDS_A_DAY:
                probe.unlink()


def _require_shared(probes: Sequence[Path], token: str, sources: Sequence[str]) -> None:
    for source in sources:
        if is_uri(source):
            try:
                require_reachable(source)
            except CorpusError as error:
                raise CorpusError(
                    f"{error}; on a cluster its address and keys must be in the environment that "
                    "ray start has on each machine"
                ) from error
        elif not exists(source):
            raise CorpusError(
                f"{source} of the corpus is not there; on a cluster it must be on a disk that all "
                "machines mount at the same path, or in a bucket"
            )
    for probe in probes:
        try:
            with reading(probe):
                same = probe.read_text() == token
        except FileNotFoundError:
            same = False
        if not same:
            raise StorageError(
                f"{probe.parent} is not the folder that the build was started with; on a cluster "
                "store and index must be on a disk that all its machines mount at the same path"
            )
        own = probe.with_name(f"{probe.name}-{uuid.uuid4().hex[:8]}")
        with writing(own, kept=""):
            own.write_text(token)
            own.unlink()
