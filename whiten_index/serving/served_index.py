"""An index that the server answers from, and its newest version when there is one."""

import threading
from pathlib import Path
from typing import Any

from whiten_index.errors import WhitenIndexError
from whiten_index.paths import cell
from whiten_index.search.search_index import Opened, SearchIndex, open_index
from whiten_index.serving.comparison import Comparison
from whiten_index.serving.metrics import Metrics
from whiten_index.serving.serve_options import ServeOptions

_OPENING = ("store", "rerank", "mapped", "verify", "model", "trust_remote_code", "device",
            "backend", "threads")  # fmt: skip


class ServedIndex:
    """An opened index under a name; ``opened`` is the version that answers now."""

    def __init__(
        self, name: str, place: Path | str, options: ServeOptions, metrics: Metrics
    ) -> None:
        given: dict[str, Any] = {each: getattr(options, each) for each in _OPENING}
        self.name, self.place, self._options, self._metrics = name, place, options, metrics
        self._index: SearchIndex = open_index(
            place, **{each: value for each, value in given.items() if value is not None}
        )
        if self.encodes:
            _ = self._index.encoder
        # Why the newest version does not answer; empty if it does.
        self.fault = ""
        self._comparing = threading.Lock()
        self._comparison: tuple[Opened, Comparison] | None = None
        metrics.version(name, self.opened.bundle.version, len(self.opened.bundle), None)

    @property
    def opened(self) -> Opened:
        """The version that answers."""
        return self._index.opened

    @property
    def encodes(self) -> bool:
        """True if the index knows the encoder of its queries."""
        return self._index.encoder_config is not None

    def reload(self) -> None:
        """Open the newest version; if that fails, the one before goes on answering."""
        before = self.opened.bundle.version
        try:
            if self._index.reload():
                bundle = self.opened.bundle
                self._metrics.version(self.name, bundle.version, len(bundle), before)
                self._comparison = None
            self.fault = ""
        except WhitenIndexError as error:
            self.fault = cell(error)
        self._metrics.fault(self.name, failed=bool(self.fault))

    def comparison(self) -> Comparison:
        """Return the raw embeddings of the version that answers, read on the first call.

        Raises:
            ArtifactError: the store is not at hand.
            ConfigError: they are larger than what the server may hold.
        """
        with self._comparing:
            opened = self.opened
            if self._comparison is None or self._comparison[0] is not opened:
                self._comparison = None
                made = Comparison.of(
                    opened, self.place, self._options.store, self._options.compare_bytes
                )
                self._comparison = opened, made
            return self._comparison[1]
