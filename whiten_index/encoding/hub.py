"""Models of the Hugging Face hub: one commit, in the cache of the hub's client."""

import errno
from dataclasses import dataclass
from pathlib import Path

from whiten_index.artifacts.files import list_folder
from whiten_index.encoding.model_files import read_modules
from whiten_index.errors import EncoderError, StorageError, WhitenIndexError, first_line

_WANTED = ("*.json", "*.txt", "*.model", "*.safetensors", "*.py")
_ONNX = "onnx/model.onnx*"  # with the file of its weights
_UNWANTED = ["onnx/*", "openvino/*", "*.onnx"]
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Hub:
    """A repository of the hub; ``otherwise`` is another way to have the model, for errors."""

    name: str
    revision: str | None
    local_files_only: bool
    otherwise: str = ""

    def fetch_model(self, *, onnx: bool) -> Path:
        """Return the folder of a commit, fetching the files of a model that it lacks."""
        path = self.fetch(*_WANTED)
        modules = read_modules(path)
        holders = {each.path for each in modules if each.kind not in ("Pooling", "Normalize")}
        # Pickled weights are fetched only of a module that has no safetensors.
        more = [
            (folder.relative_to(path) / "pytorch_model*.bin").as_posix()
            for folder in sorted(holders or {path})
            if not list_folder(folder, "*.safetensors")
        ]
        if more := [*more, *([_ONNX] if onnx else [])]:
            self.fetch(*more, revision=path.name)
        return path

    def fetch(self, *patterns: str, revision: str | None = None) -> Path:
        """Return the folder of a commit; without network the cache alone is asked."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError

        try:
            return Path(
                snapshot_download(
                    self.name,
                    revision=revision or self.revision,
                    allow_patterns=list(patterns),
                    ignore_patterns=None if _ONNX in patterns else _UNWANTED,
                    local_files_only=self.local_files_only,
                )
            )
        except Exception as error:
            # The hub's client raises errors of several libraries here.
            if self.local_files_only:
                raise self._not_here() from error
            if isinstance(error, HFValidationError):
                raise EncoderError(
                    f"model {self.name!r} is neither a folder here nor a name on the hub; check "
                    "the spelling"
                ) from error
            raise self._explained(error) from error

    def _shown(self) -> str:
        of = "" if self.revision is None else f" at revision {self.revision!r}"
        return f"model {self.name!r}{of}"

    def _not_here(self) -> EncoderError:
        return EncoderError(
            f"{self._shown()} is not on this machine and is not fetched unasked; if you trust it, "
            "name it with --model (in Python model=) and leave out --local-files-only, which "
            "fetches it from the hub, or name the folder that it is in now"
            f"{self.otherwise}"
        )

    def _explained(self, error: Exception) -> WhitenIndexError:
        """Return the error to raise for one of the hub's client, with the remedy."""
        from huggingface_hub import constants, errors

        hub, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
        # If the cache does not help either, the client's error is about that, with the real one
        # inside.
        cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else None
        reason = cause or error
        shown = f"{type(reason).__name__}: {first_line(reason)[:160]}"
        # Only errors of files have a file name or such a number; errors of the network have
        # neither.
        if isinstance(reason, OSError) and (reason.filename or reason.errno in _FULL):
            return StorageError(
                f"model {self.name!r} cannot be kept in {cache} ({shown}); make room there, or set "
                "HF_HOME to another folder"
            )
        return EncoderError(
            f"{self._shown()} is no folder here, nor whole in the cache {cache}, and cannot be "
            f"fetched from {hub} ({shown}); check the spelling, --revision, the network, "
            "HF_ENDPOINT and HF_HUB_OFFLINE, and run this again, which keeps the files that came "
            f"whole; if it is private or gated, ask for access at {hub}/{self.name}, then log in "
            "with 'hf auth login' or set HF_TOKEN; or give a local folder"
            f"{self.otherwise}"
        )
