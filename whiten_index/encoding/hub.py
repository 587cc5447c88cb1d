"""Fetch a model's files from the Hugging Face hub into its local cache, or find them there."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

from whiten_index.artifacts.files import list_folder
from whiten_index.encoding.st_modules import module_folder, read_modules, weighty
from whiten_index.errors import EncoderError, StorageError, WhitenIndexError

_WANTED = ["*.json", "*.txt", "*.model", "*.safetensors", "*.py"]
_UNWANTED = ["onnx/*", "openvino/*", "*.onnx"]
_LOG_IN = "log in with 'hf auth login' or set HF_TOKEN"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_REASON_LETTERS = 160


def fetch_model(
    name: str, revision: str | None, *, local_files_only: bool = False, otherwise: str = ""
) -> Path:
    """Return the folder of a commit in the hub's cache, fetching the files that it lacks.

    Fetched are configuration, tokenizer and safetensors; pickled weights only of a module that
    has no others. Without network, or with ``HF_HUB_OFFLINE``, the cache alone is asked.

    Args:
        name: on the hub.
        revision: branch, tag or commit; None for the hub's default.
        local_files_only: look in the cache alone.
        otherwise: how else this model is to be had, added to the message where there is no network.

    Raises:
        EncoderError: there is no such model or revision, it may not be read, or the hub cannot be
            reached and the cache does not hold it whole.
        StorageError: the cache cannot be written.
    """
    how: dict[str, Any] = {"local_files_only": local_files_only, "otherwise": otherwise}
    path = _fetch(name, revision, _WANTED, **how)
    if pickled := _without_safetensors(path):
        path = _fetch(name, revision, [*_WANTED, *pickled], **how)
    return path


def _fetch(
    name: str,
    revision: str | None,
    patterns: list[str],
    *,
    local_files_only: bool,
    otherwise: str = "",
) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=_UNWANTED,
                local_files_only=local_files_only,
            )
        )
    except HFValidationError as error:
        raise EncoderError(
            f"model {name!r} is neither a folder here nor a name on the hub; check the spelling"
        ) from error
    except Exception as error:
        if local_files_only:
            raise not_here(name, revision, otherwise) from error
        # The hub's client raises errors of several libraries here; all mean: not to be had.
        raise _explained(name, revision, error, otherwise) from error


def fetch_code(name: str, revision: str | None, *, local_files_only: bool = False) -> Path:
    """Return the folder of a commit of Python code that a model takes from another repository.

    Args:
        name: of the repository on the hub.
        revision: see ``fetch_model``.
        local_files_only: see ``fetch_model``.

    Raises:
        EncoderError: there is no such repository or revision, or it cannot be fetched.
        StorageError: the cache cannot be written.
    """
    return _fetch(name, revision, ["*.py"], local_files_only=local_files_only)


def not_here(name: str, revision: str | None, otherwise: str = "") -> EncoderError:
    """Return the error of a model that is not on this machine and may not be fetched."""
    of = "" if revision is None else f" at revision {revision!r}"
    return EncoderError(
        f"model {name!r}{of} is not on this machine and is not fetched unasked; if you trust it, "
        "name it with --model (in Python model=) and leave out --local-files-only, which fetches "
        f"it from the hub, or name the folder that it is in now{otherwise}"
    )


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
