"""LangChain: the whitened encoder as ``Embeddings``, a published index as a retriever.

With ``WhitenedEmbeddings`` any vector store of LangChain holds whitened vectors; with
``WhitenedRetriever`` the index itself is searched, and no store is needed.
"""

from pathlib import Path
from typing import Annotated, Any

from whiten_index.evaluation.trec_run import kept_names
from whiten_index.integrations.lazy import IndexRetriever, importing, name_of, open_transform

with importing("langchain-core", of="LangChain", extra="langchain"):
    from langchain_core.callbacks import CallbackManagerForRetrieverRun
    from langchain_core.documents import Document
    from langchain_core.embeddings import Embeddings
    from langchain_core.retrievers import BaseRetriever
    from pydantic import BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator

# Metadata next to the kept columns.
_OWN = ("id", "score")


class WhitenedEmbeddings(Embeddings):
    """Texts to the vectors of k numbers that an index holds; see ``open_transform``.

    Queries and documents get the prompts that the index knows for them.

    Attributes:
        name: of the encoder and its transform. It changes with each refit, so use it as the
            ``namespace`` of a ``CacheBackedEmbeddings``.
    """

    def __init__(self, source: Path | str, **options: Any) -> None:
        """Read the transform of ``source`` with the options of ``open_transform``; see there.

        The encoder is loaded on the first text.
        """
        self._transform = open_transform(source, **options)
        self.name = name_of(self._transform)

    def __repr__(self) -> str:
        return f"WhitenedEmbeddings({self.name!r})"

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return the vectors (n, k) of documents.

        Raises:
            ConfigError: a text is blank.
            EncoderError: the model is missing, or is not the one the index was built with.
        """
        return list(self._transform.encode_documents(texts).tolist())

    def embed_query(self, text: str) -> list[float]:
        """Return the vector (k,) of a query; see ``embed_documents``."""
        return list(self._transform.encode_queries([text])[0].tolist())


class WhitenedRetriever(BaseRetriever):
    """A published index as a retriever; ``top_k`` and ``row_filter`` may be given to ``invoke``.

    A document's ``page_content`` is its text column; its metadata are ``id``, ``score`` and
    the other kept columns, of which ``score`` is ``kept_score``. The other fields are those of
    ``IndexRetriever``.
    Copies, as by ``with_config``, share the opened index. One that was pickled or written down
    opens the version that is published then; consent to remote code is not written down, but
    ``langchain_core.load`` takes it from a file that somebody put it into: load your own files.
    """

    # The input may be an address with a secret.
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    index: Annotated[str, BeforeValidator(str)]
    top_k: int = Field(default=10, ge=1)
    text_column: str | None = None
    row_filter: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    trust_remote_code: bool = Field(default=False, exclude=True)
    _opened: tuple[Any, IndexRetriever] | None = PrivateAttr(default=None)

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Let ``langchain_core.load.dumps`` write it down."""
        return True

    @model_validator(mode="after")
    def _checked(self) -> "WhitenedRetriever":
        self._retriever.check(self.row_filter)
        kept_names(self._retriever.columns, _OWN)
        return self

    def reload(self) -> bool:
        """Open the version published since; copies get it too. See ``IndexRetriever.reload``."""
        return self._retriever.reload()

    @property
    def _retriever(self) -> IndexRetriever:
        # A copy may have another index or other options than the original.
        given: dict[str, Any] = {
            "index": self.index, "text_column": self.text_column, "options": dict(self.options),
            "trust_remote_code": self.trust_remote_code,
        }  # fmt: skip
        if self._opened is None or self._opened[0] != given:
            self._opened = given, IndexRetriever(**given)
        return self._opened[1]

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun,  # noqa: ARG002
        top_k: int | None = None,
        row_filter: str | None = None,
    ) -> list[Document]:
        found = self._retriever.search(
            [query],
            top_k=self.top_k if top_k is None else top_k,
            row_filter=self.row_filter if row_filter is None else row_filter,
        )
        return [
            Document(
                id=str(hit.id),
                page_content=text,
                metadata={
                    **{n: hit.columns[k] for k, n in kept_names(hit.columns, _OWN).items()},
                    "id": hit.id,
                    "score": hit.score,
                },
            )
            for text, hit in found
        ]
