"""Query transforms and indexes as the classes of frameworks hold them: copied and pickled."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from typing_extensions import Unpack

from whiten_index.artifacts.files import MANIFEST, exists
from whiten_index.corpus.batches import PASSAGE_TEXT
from whiten_index.encoding.spec import EncoderOpening, require_options
from whiten_index.errors import ConfigError
from whiten_index.paths import absolute, as_place, require_no_secret, require_path
from whiten_index.search.query_transform import QueryTransform
from whiten_index.search.search_index import Hit, OpenOptions, SearchIndex, open_index
from whiten_index.versions.published import CURRENT


@contextmanager
def importing(package: str, *, of: str, extra: str) -> Iterator[None]:
    """Import a framework in the block; say what to install if it cannot be imported."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"whiten_index's classes for {of} need the package {package} ({error}); "
            f"pip install 'whiten-index[{extra}]'"
        ) from error


def noted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that frameworks write down; ``ConfigError`` if they hold a permission."""
    for name, why in {
        "trust_remote_code": "a file gives no permission; remove it there, and give it as an "
        "argument in Python",
        "base_url": "no file says where texts and keys are sent; remove it there, and set "
        "OPENAI_BASE_URL",
    }.items():
        if name in settings:
            raise ConfigError(f"{name} is among written settings or options, and {why}")
    return dict(settings)


def open_transform(
    source: Path | str, *, k: int | None = None, **opening: Unpack[EncoderOpening]
) -> QueryTransform:
    """Read the transform that embedders of frameworks hold; its encoder is loaded on first use.

    Vectors have unit length. If the index ranks by dot product they keep their own, and the store
    must rank by it as well. An embedder keeps its transform, also pickled: after a refit of the
    index make a new one, and embed with it all that a store holds. One that was written down as
    settings takes the transform that it finds. Texts longer than the encoder's limit are cut to
    it, and a warning in the log counts them. If the index holds passages, split documents first,
    to get vectors such as it holds. Threads may share an embedder.

    Args:
        source: the folder of an index, or one that ``QueryTransform.save`` wrote.
        k: keep the first k numbers of each vector; None for all.
        opening: ``model``, ``trust_remote_code``, ``device``, ``backend`` and ``threads``, as
            of ``whiten_index.open_index``.

    Raises:
        ArtifactError: there is no transform, or it is damaged.
        ConfigError: an option cannot be used, or no encoder of texts is known.
    """
    place = as_place(source, what="the index or query transform")
    local = isinstance(place, Path)
    saved = local and exists(Path(place, MANIFEST)) and not exists(Path(place, CURRENT))
    made = (QueryTransform.load if saved else QueryTransform.of)(place, **opening)
    if made.spec is None:
        raise _no_encoder(source, "an embedder")
    return made if k is None else made.truncate(k)


def name_of(transform: QueryTransform) -> str:
    """Return the encoder of queries, the width of the vectors and 8 digits of the query digest.

    It changes with each refit, encoder and prompt of queries, so caches may use it as a key.
    """
    assert transform.spec is not None
    model = Path(transform.spec.model).name
    return f"{model}-whitened-{transform.k}-{transform.query_digest[:8]}"


class IndexRetriever:
    """A published index as retrievers of frameworks hold it; threads may share it.

    Attributes:
        settings: as JSON values, which frameworks write down; without the consent to remote code.
    """

    def __init__(
        self,
        index: Path | str,
        *,
        top_k: int = 10,
        text_column: str | None = None,
        row_filter: str | None = None,
        options: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """Take the settings; no file is read yet.

        Args:
            index: its folder.
            top_k: hits at most.
            text_column: kept column with the text; None for ``passage_text`` if the index holds
                passages, else ``text``.
            row_filter: condition on kept columns that hits must pass, such as ``lang == 'en'``.
            options: of ``open_index``, such as ``model``, ``device`` and ``rerank``.
            trust_remote_code: let the encoder run Python code that comes with its model.

        Raises:
            ConfigError: the path can name nothing, or an option is a permission.
        """
        require_path(str(index), what="the index")
        given = noted(options or {})
        require_options(given, OpenOptions.__annotations__)
        require_no_secret(given, what="options")
        plain = {n: str(o) if isinstance(o, Path) else o for n, o in given.items()}
        self.settings: dict[str, Any] = {
            "index": str(index), "top_k": top_k, "text_column": text_column,
            "row_filter": row_filter, "options": plain,
        }  # fmt: skip
        self._folder, self._trusted = str(absolute(index)), trust_remote_code

    def __getstate__(self) -> dict[str, Any]:
        """Pickle how the index is opened."""
        return {name: value for name, value in self.__dict__.items() if name != "opened"}

    @cached_property
    def opened(self) -> SearchIndex:
        """The index, opened on first use."""
        options = self.settings["options"]
        opened = open_index(self._folder, trust_remote_code=self._trusted, **options)
        if opened.encoder_config is None:
            raise _no_encoder(self._folder, "a retriever")
        return opened

    @property
    def columns(self) -> list[str]:
        """Kept columns that hits have next to their text."""
        kept = self.opened.bundle.documents.columns
        text = self._text_column(kept)
        return [name for name in kept if name != text]

    def check(self, row_filter: str | None = None) -> None:
        """Open the index, and refuse settings that no search of it can take.

        Raises:
            ArtifactError: nothing is published there, or it is damaged.
            ConfigError: an option cannot be used, the text column is not kept, or the index knows
                no encoder of queries.
        """
        _ = self.columns
        for each in (row_filter, self.settings["row_filter"]):
            if each is not None:
                self.opened.matches(each)

    def warm_up(self) -> None:
        """Open the index and load the encoder of queries, once; see ``check``.

        Raises:
            EncoderError: the model is missing, or is not the one the index was built with.
        """
        self.check()
        _ = self.opened.encoder

    def reload(self) -> bool:
        """Open the version published since, and return whether there is one.

        Raises:
            WhitenIndexError: the new version cannot be opened; the one before stays in use.
        """
        return self.opened.reload()

    def search(
        self, queries: Sequence[str], *, top_k: int | None = None, row_filter: str | None = None
    ) -> list[tuple[str, Hit]]:
        """Return texts and hits without their text, best first.

        Several queries are searched for by their mean embedding. ``top_k`` and
        ``row_filter`` take the place of the settings.
        """
        how: dict[str, Any] = {
            "top_k": self.settings["top_k"] if top_k is None else top_k,
            "row_filter": self.settings["row_filter"] if row_filter is None else row_filter,
        }
        if len(queries) == 1:
            (hits,) = self.opened.search(queries, **how)
        else:
            mean = self.opened.encode(queries).mean(axis=0, keepdims=True)
            (hits,) = self.opened.search_embeddings(mean, **how)
        return [self._found(hit) for hit in hits]

    def _found(self, hit: Hit) -> tuple[str, Hit]:
        columns = dict(hit.columns)
        text = columns.pop(self._text_column(columns))
        return text or "", replace(hit, columns=columns)

    def _text_column(self, kept: Sequence[str] | Mapping[str, Any]) -> str:
        default = PASSAGE_TEXT if self.opened.grouped else "text"
        asked: str = self.settings["text_column"] or default
        if asked not in kept:
            raise ConfigError(
                f"the index {self._folder} keeps no column {asked} ({', '.join(kept) or 'none'} "
                "kept), which would be the text of hits; name a kept one with text_column, or "
                f"build the index again with --keep {asked}"
            )
        return asked


def _no_encoder(source: Path | str, who: str) -> ConfigError:
    return ConfigError(
        f"{source} comes from an embedding column and names no encoder of texts, which {who} "
        "needs; build the index again with --model to name it"
    )
