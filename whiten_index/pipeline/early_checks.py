"""Checks of widths and index that options allow, before hours of encoding."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from whiten_index.encoding.spec import resolve_encoder
from whiten_index.errors import ConfigError
from whiten_index.index.choice import AUTO, FactoryChoice, IndexPlan, choose_factory
from whiten_index.index.factory import inner_index
from whiten_index.index.gpu import require_device
from whiten_index.index.training import require_training_rows
from whiten_index.whitening.selection import widths

if TYPE_CHECKING:
    from whiten_index.corpus.parquet_corpus import ParquetCorpus
    from whiten_index.pipeline.build_config import BuildConfig
    from whiten_index.whitening.transform import Whitening


def check_early(config: BuildConfig, corpus: ParquetCorpus) -> None:
    """Refuse before hours of encoding what would be refused after them.

    Raises:
        ConfigError: k or the groups do not fit the embeddings' width, the factory string cannot be
            used, no index of so many rows fits the memory budget, or there is no GPU for FAISS.
    """
    require_device(config.index_device)
    dim = corpus.dim or resolve_encoder(config.encoder_config())[0].dim
    wanted = config.whitening_config()
    wanted.require_dim(dim)
    # How many rows pass a filter, and how many passages a document has, is not known yet.
    counted = config.passage_tokens is None and config.row_filter is None
    if config.chooses and config.k is None:
        possible_widths(config, dim, rows=corpus.rows if counted else None)
        return
    width = wanted.width(dim)
    if config.factory != AUTO:
        inner = inner_index(config.factory, width or dim)
        if config.passage_tokens is None:
            # More than the corpus has cannot be left of it; but a document has many passages.
            require_training_rows(inner, config.factory, rows=corpus.rows)
    if counted and width is not None and config.budget is not None:
        choose_index(config, rows=corpus.rows, dim=dim, k=width)


def possible_widths(
    config: BuildConfig, dim: int, *, rows: int | None = None
) -> tuple[int, ...] | None:
    """Return the round widths over which the index can be built, None if all of them will do.

    The memory budget only counts if the number of rows is known.
    """
    factory, every = config.factory, widths(dim)
    found = every
    if factory != AUTO:
        found = _allowed(every, lambda k: inner_index(factory, k))
    if not found:
        # What FAISS itself refuses at any width is said first.
        inner_index(factory, dim)
        raise ConfigError(
            f"--factory {factory} fits none of the round widths that auto chooses among; name one "
            "with --k"
        )
    if rows is not None and config.budget is not None:
        narrowest = found[0]
        found = _allowed(found, lambda k: choose_index(config, rows=rows, dim=dim, k=k))
        if not found:
            choose_index(config, rows=rows, dim=dim, k=narrowest)
    return None if factory == AUTO and found == every else found


def _allowed(ks: tuple[int, ...], make: Callable[[int], object]) -> tuple[int, ...]:
    """Return the widths that ``make`` does not refuse."""
    allowed = []
    for k in ks:
        with contextlib.suppress(ConfigError):
            make(k)
            allowed.append(k)
    return tuple(allowed)


def index_plan(config: BuildConfig, *, rows: int, whitening: Whitening) -> IndexPlan:
    """Return the index to make for so many rows."""
    choice = choose_index(config, rows=rows, dim=whitening.dim, k=whitening.k)
    return IndexPlan(
        choice, config.seed, config.target_recall, budget=config.budget, device=config.index_device
    )


def choose_index(config: BuildConfig, *, rows: int, dim: int, k: int) -> FactoryChoice:
    """Choose the index that a configuration names; see ``choose_factory``."""
    return choose_factory(
        config.factory,
        rows=rows,
        dim=dim,
        k=k,
        budget=config.budget,
        target_recall=config.target_recall,
    )
