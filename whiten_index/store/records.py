"""What is known of a corpus in a store: its parts in order, and the files they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from whiten_index.artifacts import manifest
from whiten_index.artifacts.files import writing
from whiten_index.errors import ArtifactError

KIND, FORMAT_VERSION = "corpus", 1


@dataclass(frozen=True, slots=True)
class CorpusPart:
    """One shard of a corpus: where its embeddings and its rows are.

    Attributes:
        shard: fingerprint of the stored shard; empty where every row was skipped.
        documents: digest that names its ids and kept columns.
        rows: n.
        read: rows read from the corpus.
        truncated: texts cut to the encoder's limit.
    """

    shard: str
    documents: str
    rows: int
    read: int
    truncated: int


@dataclass(frozen=True, slots=True)
class CorpusFile:
    """One file of a corpus, whose parts follow those of the files before it.

    Attributes:
        name: of the file within the corpus.
        fingerprint: changes when the file does, or what is read of it; empty where only reading
            it tells.
        parts: how many it has.
        skipped: reason -> rows left out.
    """

    name: str
    fingerprint: str
    parts: int
    skipped: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class CorpusRecord:
    """The shards of one corpus in order, enough to index it without reading it again.

    Attributes:
        source: what tells this corpus from others.
        parts: its shards.
        skipped: reason -> rows left out.
        files: where the parts come from; empty in a record of an earlier release.
        index: the one index that it is kept for; empty where several are, or a user's own wish.
    """

    source: Mapping[str, Any]
    parts: tuple[CorpusPart, ...]
    skipped: Mapping[str, int]
    files: tuple[CorpusFile, ...] = ()
    index: str = ""

    @property
    def fingerprint(self) -> str:
        """Identity of the rows and their order."""
        return manifest.fingerprint({"parts": [[p.shard, p.documents] for p in self.parts]})

    @property
    def rows(self) -> int:
        """Rows that have an embedding."""
        return sum(part.rows for part in self.parts)

    @property
    def shards(self) -> tuple[str, ...]:
        """Fingerprints of the stored shards, each once, in the order they are first used."""
        return tuple(dict.fromkeys(part.shard for part in self.parts if part.rows))

    def parts_by_file(self) -> dict[str, tuple[CorpusFile, tuple[CorpusPart, ...]]]:
        """Return file name -> the file and its parts."""
        found, start = {}, 0
        for file in self.files:
            found[file.name] = file, self.parts[start : start + file.parts]
            start += file.parts
        return found

    def save(self, path: Path) -> None:
        """Write the record as sealed JSON, in one step.

        Raises:
            StorageError: the disk is full or cannot be written.
        """
        value = {
            "kind": KIND,
            "format_version": FORMAT_VERSION,
            "source": dict(self.source),
            "skipped": dict(self.skipped),
            "parts": [asdict(part) for part in self.parts],
            "files": [asdict(file) for file in self.files],
            "index": self.index,
        }
        with writing(path):
            manifest.write_manifest(path, value)

    @classmethod
    def load(cls, path: Path) -> CorpusRecord:
        """Read what ``save`` wrote.

        Raises:
            ArtifactError: the file is missing or damaged.
        """
        value = manifest.read_manifest(
            path.parent, kind=KIND, version=FORMAT_VERSION, name=path.name
        )
        try:
            parts = tuple(CorpusPart(**part) for part in value["parts"])
            files = tuple(CorpusFile(**file) for file in value.get("files", ()))
            return cls(value["source"], parts, value["skipped"], files, value.get("index", ""))
        except (KeyError, TypeError) as error:
            raise ArtifactError(
                f"{path} cannot be read as the record of a corpus ({error}); encode it again"
            ) from error
