"""Sentences of a corpus as a dataset: Arrow holds them, and a batch is tokenised when it is due."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from torch import Tensor
from torch.utils.data import Dataset

from whiten_index.corpus.batches import TextBatch
from whiten_index.corpus.parquet_corpus import ParquetCorpus
from whiten_index.errors import CorpusError


class Sentences(Dataset[str]):
    """n sentences by their number."""

    def __init__(self, texts: pa.ChunkedArray) -> None:
        self.texts = texts

    @classmethod
    def of(cls, corpus: ParquetCorpus, *, batch_size: int) -> Sentences:
        """Read the sentences of a corpus; rows without any are left out.

        Raises:
            CorpusError: the corpus cannot be read, or has fewer sentences than a batch.
        """
        chunks = list[pa.Array]()
        for shard in corpus.shards:
            batch = corpus.read(shard)
            assert isinstance(batch, TextBatch)
            chunks.append(pa.array(batch.texts, pa.large_string()))
        texts = pa.chunked_array(chunks, pa.large_string()).combine_chunks()
        if len(texts) < batch_size:
            raise CorpusError(
                f"the corpus has {len(texts)} sentences, fewer than a batch of {batch_size}; name "
                "more, or take smaller batches"
            )
        return cls(texts)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, number: int) -> str:
        text: str = self.texts[number].as_py()
        return text


@dataclass(frozen=True)
class Collator:
    """Tokenises the sentences of a batch, padded to the longest."""

    tokenizer: Any
    max_length: int
    lower_case: bool = False

    def __call__(self, sentences: Sequence[str]) -> Mapping[str, Tensor]:
        """Return ``input_ids`` and ``attention_mask``, both (n, t)."""
        tokens = self.tokenizer(
            [each.lower() for each in sentences] if self.lower_case else list(sentences),
            padding=True,
            truncation=True,
            max_length=self.max_length,
            return_tensors="pt",
        )
        return {key: tokens[key] for key in ("input_ids", "attention_mask")}
