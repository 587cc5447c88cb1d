"""Fetch a model's files from the Hugging Face hub into its local cache, or find them there."""

from __future__ import annotations

import errno
from pathlib import Path

from whiten_index.artifacts.files import list_folder
from whiten_index.encoding.modules import module_folder, read_modules, weighty
from whiten_index.errors import EncoderError, StorageError, WhitenIndexError

_WANTED = ["*.json", "*.txt", "*.model", "*.safetensors", "*.py"]
_UNWANTED = ["onnx/*", "openvino/*", "*.onnx"]
_LOG_IN = "log in with 'hf auth login' or set HF_TOKEN"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_REASON_LETTERS = 160


def fetch_model(name: str, revision: str | None, *, otherwise: str = "") -> Path:
    """Return the folder of a commit in the hub's cache, fetching the files that it lacks.

    Fetched are configuration, tokenizer and safetensors; pickled weights only of a module that
    has no others. Without network, or with ``HF_HUB_OFFLINE``, the cache alone is asked.

    Args:
        name: on the hub.
        revision: branch, tag or commit; None for the hub's default.
        otherwise: how else this model is to be had, added to the message where there is no network.

    Raises:
        EncoderError: there is no such model or revision, it may not be read, or the hub cannot be
            reached and the cache does not hold it whole.
        StorageError: the cache cannot be written.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    def fetch(patterns: list[str]) -> Path:
        got = snapshot_download(
            name, revision=revision, allow_patterns=patterns, ignore_patterns=_UNWANTED
        )
        return Path(got)

    try:
        path = fetch(_WANTED)
        if pickled := _without_safetensors(path):
            path = fetch([*_WANTED, *pickled])
    except WhitenIndexError:
        raise
    except HFValidationError as error:
        raise EncoderError(
            f"model {name!r} is neither a folder here nor a name on the hub; check the spelling"
        ) from error
    except Exception as error:
        # The hub's client raises errors of several libraries here; all mean: not to be had.
        raise _explained(name, revision, error, otherwise) from error
    return path


def _without_safetensors(path: Path) -> list[str]:
    """Return patterns for the weights of a hub's folder that it holds in the older format only."""
    modules = read_modules(path)
    holders = [*modules[:1], *filter(weighty, modules[1:])] or [{}]
    folders = {module_folder(path, module) for module in holders}
    return [
        (folder.relative_to(path) / "pytorch_model*.bin").as_posix()
        for folder in sorted(folders)
        if not list_folder(folder, "*.safetensors")
    ]


def _explained(
    name: str, revision: str | None, error: Exception, otherwise: str
) -> WhitenIndexError:
    """Return what to raise for an error of the hub's client: what it means and what to do."""
    from huggingface_hub import constants, errors

    hub, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    # Where the cache did not help either, the client's error is about that; its cause is ours.
    cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else None
    reason = cause or error
    status = getattr(getattr(reason, "response", None), "status_code", None)
    if isinstance(reason, errors.OfflineModeIsEnabled):
        return EncoderError(
            f"model {name!r} is no folder here, nor whole in the cache {cache}, and HF_HUB_OFFLINE "
            f"forbids fetching it; unset that, or give a local folder{otherwise}"
        )
    if isinstance(reason, errors.RevisionNotFoundError):
        return EncoderError(
            f"model {name!r} has no revision {revision!r} on {hub}; give --revision a branch, a "
            "tag or a commit of it"
        )
    if isinstance(reason, errors.GatedRepoError):
        return EncoderError(
            f"model {name!r} is gated: ask for access at {hub}/{name}, then {_LOG_IN} to a token "
            "of the account that has it"
        )
    # To whoever is not logged in the hub tells nothing of what is private, and calls it a 401.
    if isinstance(reason, errors.RepositoryNotFoundError) or status in (401, 403):
        return EncoderError(
            f"model {name!r} is no folder here, and {hub} shows none of that name (status "
            f"{status}); check the spelling, or {_LOG_IN} if it is private"
        )
    told = f"{type(reason).__name__}: {(str(reason).splitlines() or [''])[0][:_REASON_LETTERS]}"
    # An error of a file names it, unless it is one of writing to it; one of the network never does.
    if isinstance(reason, OSError) and (reason.filename or reason.errno in _FULL):
        return StorageError(
            f"model {name!r} cannot be kept in {cache} ({told}); make room there, or set HF_HOME "
            "to another folder"
        )
    return EncoderError(
        f"model {name!r} is no folder here and cannot be fetched from {hub} ({told}); check the "
        "network and HF_ENDPOINT and run this again, which keeps the files that came whole, or "
        f"give a local folder{otherwise}"
    )
