"""Records of corpora in a store: parts in order, and the files they come from."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import StringConstraints
from typing_extensions import TypedDict

from whiten_index.artifacts import manifest
from whiten_index.artifacts.files import writing
from whiten_index.artifacts.manifest import Count, Schema, Sealed
from whiten_index.errors import ArtifactError

REMEDY = "run the same encode or build with the corpus again, which makes just what is missing"


class CorpusSource(TypedDict):
    """Identity of a corpus; see ``CorpusConfig.source_identity``."""

    sources: list[str]
    text_columns: list[str]
    embedding_column: str | None
    row_filter: str | None
    limit: Count | None
    passages: NotRequired[tuple[Count, Count]]


@dataclass(frozen=True, slots=True)
class CorpusPart:
    """A stretch of rows of a corpus, as they were read together."""

    # Name of the digests of its texts; empty where every row was skipped.
    digests: Annotated[str, StringConstraints(pattern="^([0-9a-f]{32})?$")]
    # Name of its ids and kept columns.
    documents: Annotated[str, StringConstraints(pattern="^[0-9a-f]*$")]
    rows: Count  # n
    read: Count  # rows read from the corpus
    truncated: Count  # texts cut to the encoder's limit
    bytes: Count  # size of its embeddings in the store


@dataclass(frozen=True, slots=True)
class CorpusFile:
    """One file of a corpus, whose parts follow those of the files before it."""

    name: str  # of the file within the corpus
    fingerprint: str  # changes with the file and the columns read; empty where only reading shows
    parts: Count  # number of its parts
    skipped: Mapping[str, Count] = field(default_factory=dict)  # reason -> rows left out


class _Fields(Sealed):
    source: CorpusSource
    parts: tuple[CorpusPart, ...]
    skipped: dict[str, Count]
    files: tuple[CorpusFile, ...]
    index: str


SCHEMA = Schema("corpus", 1, _Fields)


@dataclass(frozen=True)
class CorpusRecord:
    """The parts of one corpus in order, enough to index it without reading it again."""

    source: Mapping[str, Any]  # identity of the corpus
    parts: tuple[CorpusPart, ...]  # its rows
    skipped: Mapping[str, int]  # reason -> rows left out
    files: tuple[CorpusFile, ...] = ()  # files that the parts come from, in their order
    # The one index that it is kept for; empty if there are several, or the user made it.
    index: str = ""

    @property
    def fingerprint(self) -> str:
        """Identity of the rows and their order."""
        return manifest.fingerprint({"parts": [[p.digests, p.documents] for p in self.parts]})

    @property
    def rows(self) -> int:
        """Rows that have an embedding."""
        return sum(part.rows for part in self.parts)

    @property
    def distinct_parts(self) -> tuple[CorpusPart, ...]:
        """Parts with rows, those with the same texts once, in the order they are first used."""
        found = dict[str, CorpusPart]()
        for part in self.parts:
            if part.rows:
                found.setdefault(part.digests, part)
        return tuple(found.values())

    def parts_by_file(self) -> dict[str, tuple[CorpusFile, tuple[CorpusPart, ...]]]:
        """Return file name -> the file and its parts."""
        found, start = {}, 0
        for file in self.files:
            found[file.name] = file, self.parts[start : start + file.parts]
            start += file.parts
        return found

    def save(self, path: Path) -> None:
        """Write the record as sealed JSON, in one step."""
        with writing(path):
            manifest.write_manifest(path, SCHEMA.headed(**asdict(self)))

    @classmethod
    def load(cls, path: Path) -> "CorpusRecord":
        """Read what ``save`` wrote."""
        fields = manifest.read_manifest(path.parent, SCHEMA, name=path.name)
        parts, files = fields["parts"], fields["files"]
        if files and sum(file.parts for file in files) != len(parts):
            raise ArtifactError(
                f"{path} is damaged: its files do not have its {len(parts)} parts; encode the "
                "corpus again"
            )
        return cls(fields["source"], parts, fields["skipped"], files, fields["index"])
