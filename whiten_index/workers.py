"""Who does the work of a build: this process, or workers on a cluster."""

from __future__ import annotations

import contextlib
import functools
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from whiten_index.artifacts.atomic import make_folder
from whiten_index.artifacts.files import exists, is_folder, list_folder, reading, writing
from whiten_index.artifacts.paths import is_uri
from whiten_index.corpus import require_reachable
from whiten_index.errors import CorpusError, StorageError
from whiten_index.pipeline.build_config import BuildConfig
from whiten_index.progress import Stages
from whiten_index.runners import Calls, CrewCalls, InThisProcess, Size, cluster

_PROBE, _SECONDS_A_DAY = ".tmp-shared-", 86_400.0


@contextlib.contextmanager
def hired(config: BuildConfig, stages: Stages) -> Iterator[tuple[BuildConfig, Calls]]:
    """Hire workers for the block, where a cluster is asked for.

    Args:
        config: of the build.
        stages: told what a user should know.

    Yields:
        The configuration, whose places are then the same on every machine, and who to call.

    Raises:
        ConfigError: Ray is not installed, or the cluster is too small.
        ClusterError: the cluster cannot be reached.
    """
    if config.runner != "ray":
        yield config, InThisProcess()
        return
    config = on_every_machine(config)
    # A bucket is the same for all.
    folders = [
        Path(place)
        for place in (config.out, config.store)
        if place is not None and not is_uri(place)
    ]
    size = Size(workers=config.workers, gpu=_wants_gpu(config))
    sources = tuple(
        Path(source).absolute() for source in config.corpus if not is_uri(source) and exists(source)
    )
    remote = tuple(source for source in config.corpus if is_uri(source))
    with (
        _shared(folders, sources, remote) as check,
        cluster(config.address, size, stages.watcher.note) as crew,
    ):
        crew.start(check)
        yield config, CrewCalls(crew)


def on_every_machine(config: BuildConfig) -> BuildConfig:
    """Return a configuration whose places mean the same on all machines, as relative ones do not.

    What this process does itself is not changed.
    """
    if config.runner != "ray":
        return config
    model = config.model
    if model is not None and is_folder(model):
        model = str(Path(model).absolute())
    return replace(
        config,
        out=None if config.out is None else _everywhere(config.out_place),
        store=None if config.store is None else _everywhere(config.store_place),
        model=model,
    )


def _everywhere(place: Path | str) -> str:
    """Return a place as every machine calls it; links are left, which may lead elsewhere there."""
    return place if isinstance(place, str) else str(place.absolute())


def _wants_gpu(config: BuildConfig) -> bool | None:
    """Return whether workers need a GPU, None to take what the cluster has."""
    if config.embedding_column is not None:
        return False
    return None if config.device == "auto" else config.device != "cpu"


@contextlib.contextmanager
def _shared(
    folders: list[Path], sources: tuple[Path, ...] = (), remote: tuple[str, ...] = ()
) -> Iterator[Callable[[], None]]:
    """Yield what a worker checks: that it sees corpus and folders, and may write in these."""
    token = uuid.uuid4().hex
    for folder in folders:
        _tidy(folder)
    probes = [folder / f"{_PROBE}{token}" for folder in folders]
    made = []
    try:
        for probe in probes:
            with writing(probe, kept=""):
                make_folder(probe.parent)
                probe.write_text(token)
                made.append(probe)
        yield functools.partial(_require_shared, tuple(probes), token, sources, remote)
    finally:
        for probe in made:
            with contextlib.suppress(OSError):
                probe.unlink(missing_ok=True)


def _tidy(folder: Path) -> None:
    """Remove what builds left that were killed a day ago or longer."""
    for left in list_folder(folder, f"{_PROBE}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _SECONDS_A_DAY:
                left.unlink()


def _require_shared(
    probes: tuple[Path, ...],
    token: str,
    sources: tuple[Path, ...] = (),
    remote: tuple[str, ...] = (),
) -> None:
    for uri in remote:
        try:
            require_reachable(uri)
        except CorpusError as error:
            raise CorpusError(
                f"{error}; on a cluster its address and keys must be in the environment that ray "
                "start has on each machine"
            ) from error
    for source in sources:
        if not exists(source):
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
