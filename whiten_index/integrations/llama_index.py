"""LlamaIndex: the whitened encoder as its embedding, a published index as a retriever."""

import asyncio
from pathlib import Path
from typing import Any, Self

from whiten_index.corpus.batches import PASSAGE_COLUMNS
from whiten_index.encoding.encoder_config import BackendName
from whiten_index.errors import ConfigError
from whiten_index.integrations.lazy import IndexRetriever, importing, name_of, noted, open_transform
from whiten_index.search.query_transform import QueryTransform
from whiten_index.search.search_index import Hit

with importing("llama-index-core", of="LlamaIndex", extra="llama-index"):
    from llama_index.core.base.embeddings.base import BaseEmbedding
    from llama_index.core.bridge.pydantic import (
        BaseModel,
        ConfigDict,
        Field,
        PrivateAttr,
        field_validator,
    )
    from llama_index.core.callbacks import CallbackManager
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

# The encoder sorts texts by length and fills batches by tokens, the better the more it is given.
_BATCH = 1024


class WhitenedEmbedding(BaseEmbedding):
    """Texts to the vectors of k numbers that an index holds; see ``open_transform``.

    Queries and texts of nodes get the prompts that the index knows for queries and documents.
    ``model_name`` changes with a refit, so the cache of an ``IngestionPipeline`` gives no vector of
    the earlier transform.

    Attributes:
        model_name: of the encoder and its transform, with digits of the query digest; set here.
        embeddings_cache: None. It would find vectors by their texts alone, so mix those of queries
            and documents, and of different transforms.
        trust_remote_code: see ``open_transform``, as for the other fields; not written down.
            Pydantic's own ``model_validate_json`` takes it from a file: use ``from_json``.
    """

    # The input may be an address with a secret.
    model_config = ConfigDict(extra="forbid", validate_assignment=True, hide_input_in_errors=True)

    model_name: str = Field(frozen=True)
    source: str = Field(frozen=True)
    k: int | None = Field(default=None, frozen=True)
    model: str | None = Field(default=None, frozen=True)
    trust_remote_code: bool = Field(default=False, frozen=True, exclude=True)
    device: str = Field(default="auto", frozen=True)
    backend: BackendName = Field(default="torch", frozen=True)
    threads: int | None = Field(default=None, frozen=True)
    _transform: QueryTransform = PrivateAttr()

    def __init__(self, source: Path | str, **settings: Any) -> None:
        """Read the transform of ``source`` with the options of ``open_transform``; see there.

        Other settings are those of ``BaseEmbedding``. The encoder is loaded on the first text.
        """
        names = ("k", "model", "trust_remote_code", "device", "backend", "threads")
        transform = open_transform(source, **{n: settings[n] for n in names if n in settings})
        # What was written down names the transform of then.
        named = {**settings, "model_name": name_of(transform)}
        super().__init__(source=str(source), **{"embed_batch_size": _BATCH, **named})
        self._transform = transform

    @field_validator("embeddings_cache", mode="before")
    @classmethod
    def _no_cache(cls, given: object) -> None:
        if given is not None:
            raise ConfigError(
                "embeddings_cache cannot be given: it finds vectors by their texts alone, so it "
                "mixes those of queries and documents, and of other transforms; leave it out, and "
                "give IngestionPipeline(cache=...) a cache, which keeps them apart"
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what was pickled; the base would open any transform again."""
        fields = type(self).model_fields
        # The base leaves out what cannot be pickled, such as handlers of callbacks.
        lost = fields.keys() - state["__dict__"].keys()
        made = {name: fields[name].get_default(call_default_factory=True) for name in lost}
        BaseModel.__setstate__(self, {**state, "__dict__": {**made, **state["__dict__"]}})

    @classmethod
    def from_dict(cls, data: dict[str, Any], **given: Any) -> Self:
        """Make one of written settings and of those given now, which alone may give consent."""
        made: Self = super().from_dict(noted(data), **given)
        return made

    @classmethod
    def class_name(cls) -> str:
        """Return the name under which LlamaIndex writes it down."""
        return "WhitenedEmbedding"

    def _get_query_embedding(self, query: str) -> list[float]:
        return list(self._transform.encode_queries([query])[0].tolist())

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return list(self._transform.encode_documents(texts).tolist())

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await asyncio.to_thread(self._get_query_embedding, query)

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return await asyncio.to_thread(self._get_text_embedding, text)

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return await asyncio.to_thread(self._get_text_embeddings, texts)


class WhitenedIndexRetriever(BaseRetriever):
    """A published index as a retriever of nodes with scores.

    A node's text is the text column, its id the document's, and its metadata are ``id`` and the
    other kept columns; the place of a passage in its document is not shown to the LLM.

    Several texts that a query transform wants embedded (``custom_embedding_strs``) are searched for
    by the mean of their embeddings. An embedding in the ``QueryBundle`` is not used, as it may be
    of another model.
    """

    def __init__(
        self,
        index: Path | str,
        *,
        callback_manager: CallbackManager | None = None,
        verbose: bool = False,
        **settings: Any,
    ) -> None:
        """Open the index with the settings of ``IndexRetriever``, such as ``top_k``.

        It raises what ``IndexRetriever.check`` does; the rest is as in ``BaseRetriever``.
        """
        self._index = IndexRetriever(index, **settings)
        self._index.check()
        super().__init__(callback_manager=callback_manager, verbose=verbose)

    def reload(self) -> bool:
        """Open the version published since; see ``IndexRetriever.reload``."""
        return self._index.reload()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        texts = query_bundle.embedding_strs or [query_bundle.query_str]
        return [_node(*each) for each in self._index.search(texts)]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._retrieve, query_bundle)


def _node(text: str, hit: Hit) -> NodeWithScore:
    unsaid = [name for name in PASSAGE_COLUMNS if name in hit.columns]
    node = TextNode(
        id_=str(hit.id),
        text=text,
        metadata={"id": hit.id, **hit.columns},
        excluded_llm_metadata_keys=unsaid,
        excluded_embed_metadata_keys=unsaid,
    )
    return NodeWithScore(node=node, score=hit.score)
