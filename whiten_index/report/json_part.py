"""Reads a JSON file part by part, with errors that name the place."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from whiten_index.errors import ArtifactError


@dataclass(frozen=True)
class JsonPart:
    """A JSON object and where it stands in its file.

    Every method raises an ``ArtifactError`` where a value is missing or of another kind.

    Attributes:
        fields: the object.
        path: the file.
        where: the object's place in the file, such as ``tables[2].rows[0]``.
        remedy: what to do about a damaged file.
    """

    fields: Mapping[str, Any]
    path: Path
    where: str
    remedy: str

    def wrong(self, name: str, expected: str) -> ArtifactError:
        """Return the error that says what ``name`` should be."""
        where = f"{self.where}.{name}" if self.where else name
        found = repr(self.fields[name])[:60] if name in self.fields else "nothing"
        return ArtifactError(
            f"{self.path} is damaged or unfinished: {where} should be {expected}, and is {found}; "
            f"{self.remedy}"
        )

    def maybe_text(self, name: str) -> str | None:
        """Return a text, None where there is none."""
        value = self.fields.get(name)
        if value is None or isinstance(value, str):
            return value
        raise self.wrong(name, "a text")

    def text(self, name: str) -> str:
        """Return a text."""
        value = self.maybe_text(name)
        if value is None:
            raise self.wrong(name, "a text")
        return value

    def number(self, name: str) -> float | None:
        """Return a number, None where there is none or it is not finite."""
        return self._number(self.fields.get(name), name)

    def _number(self, value: Any, name: str) -> float | None:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "a number or null")
        # NaN and infinity are no figures.
        return float(value) if math.isfinite(value) else None

    def _list(self, name: str, *, optional: bool = False) -> list[Any]:
        value = self.fields.get(name)
        if optional and value is None:
            return []
        if not isinstance(value, list):
            raise self.wrong(name, "a list")
        return value

    def numbers(self, name: str, *, optional: bool = False) -> tuple[float | None, ...]:
        """Return numbers, each as of ``number``."""
        values = self._list(name, optional=optional)
        return tuple(self._number(value, name) for value in values)

    def matrix(self, name: str) -> Iterator[tuple[float | None, ...]]:
        """Return rows of numbers."""
        for row in self._list(name):
            if not isinstance(row, list):
                raise self.wrong(name, "a list of rows")
            yield tuple(self._number(value, name) for value in row)

    def texts(self, name: str, *, optional: bool = False) -> tuple[str, ...]:
        """Return texts."""
        values = self._list(name, optional=optional)
        if not all(isinstance(value, str) for value in values):
            raise self.wrong(name, "a list of texts")
        return tuple(values)

    def places(self, name: str) -> tuple[float | str, ...]:
        """Return numbers or texts."""
        values = self._list(name)
        good = [isinstance(v, str | int | float) and not isinstance(v, bool) for v in values]
        if not all(good):
            raise self.wrong(name, "a list of numbers or texts")
        return tuple(values)

    def part(self, name: str) -> JsonPart | None:
        """Return an object, None where there is none."""
        value = self.fields.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return replace(self, fields=value, where=f"{self.where}.{name}".strip("."))

    def parts(self, name: str, *, optional: bool = False) -> list[JsonPart]:
        """Return the objects of a list."""
        values = self._list(name, optional=optional)
        if not all(isinstance(value, dict) for value in values):
            raise self.wrong(name, "a list of objects")
        before = f"{self.where}." if self.where else ""
        return [
            replace(self, fields=each, where=f"{before}{name}[{i}]")
            for i, each in enumerate(values)
        ]
