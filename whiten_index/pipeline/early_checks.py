"""Checks of widths and index that options allow, before hours of encoding."""

from collections.abc import Callable

from whiten_index.corpus.parquet_corpus import ParquetCorpus
from whiten_index.encoding.load_encoder import resolve_encoder
from whiten_index.errors import ConfigError
from whiten_index.index.choice import AUTO
from whiten_index.index.factory import inner_index
from whiten_index.index.gpu import require_device
from whiten_index.index.training import require_training_rows
from whiten_index.pipeline.build_config import BuildConfig
from whiten_index.whitening.selection import widths


def check_early(config: BuildConfig, corpus: ParquetCorpus) -> None:
    """Refuse before hours of encoding what would be refused after them.

    Raises:
        ConfigError: k does not fit the embeddings' width, the factory string cannot be
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
        config.index_plan(rows=corpus.rows, dim=dim, k=width)


def possible_widths(config: BuildConfig, dim: int, *, rows: int | None) -> tuple[int, ...] | None:
    """Return the round widths over which the index can be built, None if all of them will do.

    The memory budget only counts if the number of rows is known.
    """
    factory, every = config.factory, widths(dim)
    found, _ = _allowed(every, lambda k: factory == AUTO or inner_index(factory, k))
    if not found:
        # What FAISS itself refuses at any width is said first.
        inner_index(factory, dim)
        raise ConfigError(
            f"--factory {factory} fits none of the round widths that auto chooses among; name one "
            "with --k"
        )
    if rows is not None and config.budget is not None:
        found, refusal = _allowed(found, lambda k: config.index_plan(rows=rows, dim=dim, k=k))
        if refusal is not None and not found:
            raise refusal
    return None if factory == AUTO and found == every else found


def _allowed(
    ks: tuple[int, ...], make: Callable[[int], object]
) -> tuple[tuple[int, ...], ConfigError | None]:
    """Return the widths that ``make`` does not refuse, and the refusal of the narrowest."""
    allowed, refusals = list[int](), list[ConfigError]()
    for k in ks:
        try:
            make(k)
            allowed.append(k)
        except ConfigError as error:
            refusals.append(error)
    return tuple(allowed), refusals[0] if refusals else None
