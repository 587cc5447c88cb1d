"""The executor of a build: this process, or a cluster that shares its folders."""

import contextlib
import functools
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from whiten_index.artifacts.atomic import make_folder, temporary_folder
from whiten_index.artifacts.files import exists, is_folder, writing
from whiten_index.artifacts.lock import WRITER, marked
from whiten_index.corpus.sources import require_reachable
from whiten_index.distributed.executors import Executor, SerialExecutor
from whiten_index.distributed.ray_executor import cluster
from whiten_index.errors import CorpusError, StorageError, require_config
from whiten_index.paths import is_uri
from whiten_index.pipeline.build_config import BuildConfig
from whiten_index.progress import Stages


@contextlib.contextmanager
def executor_session(config: BuildConfig, stages: Stages) -> Iterator[Executor]:
    """Yield the executor that a configuration with absolute paths names.

    Until the end, nobody removes anything from its store in a bucket, nor from a store in a folder
    that an index in a bucket is built from.
    """
    places = (config.store_place, config.out)
    marked_place = next((place for place in places if place is not None and is_uri(place)), None)
    with marked(marked_place, WRITER):
        if config.runner != "ray":
            yield SerialExecutor()
            return
        gpu = None if config.device == "auto" else config.device != "cpu"
        gpu = False if config.embedding_column is not None else gpu
        address, workers, note = config.address, config.workers, stages.watcher.note
        with (
            _shared_folders(config) as check,
            cluster(address, workers=workers, gpu=gpu, check=check, note=note) as executor,
        ):
            yield executor


def with_absolute_paths(config: BuildConfig) -> BuildConfig:
    """Return a configuration whose paths mean the same on all machines of its cluster."""
    require_config(config, BuildConfig)
    if config.runner != "ray":
        return config
    places: dict[str, Any] = {}
    for name in ("out", "store", "model"):
        given = getattr(config, name)
        if given is not None and not is_uri(given) and (name != "model" or is_folder(given)):
            # Links are kept, which may lead elsewhere on another machine.
            places[name] = str(Path(given).absolute())
    return replace(config, **places)


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
    with contextlib.ExitStack() as held:
        probes = list[Path]()
        for folder in folders:
            with writing(folder, kept=""):
                make_folder(folder)
                probes.append(held.enter_context(temporary_folder(folder / "shared")) / token)
                probes[-1].touch()
        yield functools.partial(_require_shared, probes, sources)


def _require_shared(probes: Sequence[Path], sources: Sequence[str]) -> None:
    for source in sources:
        if is_uri(source):
            try:
                require_reachable(source)
            except (CorpusError, StorageError) as error:
                raise type(error)(
                    f"{error}; on a cluster its address and keys must be in the environment that "
                    "ray start has on each machine"
                ) from error
        elif not exists(source):
            raise CorpusError(
                f"{source} of the corpus is not there; on a cluster it must be on a disk that all "
                "machines mount at the same path, or in a bucket"
            )
    for probe in probes:
        folder = probe.parent.parent
        if not exists(probe):
            raise StorageError(
                f"{folder} is not the folder that the build was started with; on a cluster store "
                "and index must be on a disk that all its machines mount at the same path"
            )
        with writing(folder, kept=""), temporary_folder(folder / "worker"):
            pass
