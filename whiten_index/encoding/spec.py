"""Identity of an encoder: a model and every choice that changes its embeddings."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypedDict, Unpack

from annotated_types import Len
from pydantic import AfterValidator, StringConstraints

from whiten_index.artifacts.manifest import Count, Positive, Sha256, Width, fingerprint, json_of
from whiten_index.encoding.encoder_config import EMBEDDED, BackendName, DtypeName, EncoderConfig
from whiten_index.errors import ConfigError, EncoderError
from whiten_index.options import unknown

DEFAULT_MAX_LENGTH = 512
# Variable that names the endpoint of APIs, and the endpoint that its client takes without it.
BASE_URL, OPENAI_URL = "OPENAI_BASE_URL", "https://api.openai.com/v1"
SENTENCE_TRANSFORMERS = "sentence-transformers"  # pooling of a model that it runs
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True)
class _Identity:
    """Identity of an encoder: fingerprints, and JSON values."""

    kind: ClassVar[str]
    model: str  # name or folder, or openai:NAME
    dim: Width
    document_prompt: str
    query_prompt: str

    @property
    def fingerprint(self) -> str:
        """Identity of the embeddings of documents, 32 hex digits."""
        return self._fingerprint(queries=False)

    @property
    def query_fingerprint(self) -> str:
        """Identity of the embeddings of queries, 32 hex digits."""
        return self._fingerprint(queries=True)

    def _fingerprint(self, *, queries: bool) -> str:
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        values = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}
        return {"kind": self.kind, **values}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        names = {each.name for each in fields(cls)}
        known: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in value.items() if k in names
        }
        return cls(**known)


@dataclass(frozen=True, kw_only=True)
class EncoderSpec(_Identity):
    """An encoder's identity: equal fingerprints give embeddings that are equal up to rounding.

    It cannot be loaded by itself; for one read from a manifest see ``recorded_config``.
    """

    kind: ClassVar = "transformer"
    revision: str | None  # commit of the hub, or EMBEDDED
    weights_sha256: Sha256
    files_sha256: Sha256  # of all other files that loading may read: settings, tokenizer, code
    pooling: str  # one of POOLINGS (first-last-avg: mean of two layers), or SENTENCE_TRANSFORMERS
    layers: tuple[Count, ...]  # hidden states averaged, 0 = embeddings
    max_length: Positive  # tokens a text, special ones included
    dtype: DtypeName
    lower_case: bool
    normalizes: bool  # whether the model ends with an L2 normalisation, which is not applied
    needs_code: bool  # whether the model runs its own Python code; a fact, never a consent
    head_sha256: Sha256 | None
    code_revision: str | None
    similarity: str = "cosine"  # that the model was trained for, by its configuration
    canary: str = ""  # embeddings of fixed texts, once the model was loaded; see canary.py

    @property
    def name(self) -> str:
        """Name on the hub, or of the folder without its path, which is private."""
        return self.model if self.revision else Path(self.model).name

    @property
    def described(self) -> str:
        """Model for a message."""
        return f"the model {self.model}"

    def _fingerprint(self, *, queries: bool) -> str:
        prompt = self.query_prompt if queries else self.document_prompt
        # The digests cover what these name, and embeddings are neither normalised nor compared.
        left_out = {"model", "revision", "code_revision", "normalizes", "similarity", "canary"}
        left_out |= {"document_prompt", "query_prompt"}
        same = {key: value for key, value in self.to_json().items() if key not in left_out}
        return fingerprint({**same, "prompt": prompt})


@dataclass(frozen=True, kw_only=True)
class RemoteSpec(_Identity):
    """Identity of a model behind an API, whose weights are not here to be digested.

    ``canary`` holds its embeddings of fixed texts, which are compared and no part of fingerprints;
    see ``canary.py``.
    """

    kind: ClassVar = "api"
    model: Annotated[str, StringConstraints(pattern="^openai:.")]
    endpoint: str  # where it was asked; shown, and never used to ask again
    served: str  # what the endpoint calls the model in its answers
    dimensions: Width | None  # requested width, of a model with several
    input_types: Annotated[tuple[str, ...], Len(0, 2)]  # of documents and of queries, or none
    canary: str
    # What an EncoderSpec has and nobody here knows.
    revision: ClassVar[None] = None
    needs_code: ClassVar[bool] = False
    pooling: ClassVar[str] = "of its endpoint"
    similarity: ClassVar[str] = "cosine"
    max_length: ClassVar[int] = DEFAULT_MAX_LENGTH  # that texts are expected to reach at most

    @property
    def name(self) -> str:
        """Name in requests, after ``openai:``."""
        return self.model

    @property
    def described(self) -> str:
        """Model and endpoint for a message."""
        return f"the model {self.model} at {self.endpoint}"

    def _fingerprint(self, *, queries: bool) -> str:
        named = {"kind": self.kind, "model": self.model, "dim": self.dim}
        prompt = self.query_prompt if queries else self.document_prompt
        input_type = self.input_types[1:] if queries else self.input_types[:1]
        return fingerprint({**named, "prompt": prompt, "input_type": list(input_type)})


Spec = EncoderSpec | RemoteSpec


def recorded_spec(encoder: Mapping[str, Any]) -> Spec | None:
    """Return the encoder of queries in a manifest, None without one."""
    if encoder["kind"] == "column":
        query = encoder.get("query_encoder")
        return None if query is None else recorded_spec(query)
    return (RemoteSpec if encoder["kind"] == "api" else EncoderSpec).from_json(encoder)


def _check_encoder(value: dict[str, Any]) -> dict[str, Any]:
    if (kind := str(value.get("kind"))) not in _ENCODERS:
        raise ValueError(f"field 'kind': Input should be {' or '.join(_ENCODERS)}")
    _ENCODERS[kind]({name: each for name, each in value.items() if name not in _BESIDES})
    return value


# A spec as JSON values, with its kind and, in an exported transform, its fingerprint.
EncoderFacts = Annotated[dict[str, Any], AfterValidator(_check_encoder)]


@dataclass(frozen=True, kw_only=True)
class ColumnSpec:
    """A column of embeddings, and the model of the queries if it is known."""

    column: str
    dim: Width
    query_encoder: EncoderFacts | None


_ENCODERS = {
    "transformer": json_of(EncoderSpec), "api": json_of(RemoteSpec), "column": json_of(ColumnSpec),
}  # fmt: skip
_BESIDES = ("kind", "fingerprint")


class EncoderOpening(TypedDict, total=False):
    """Options for loading the encoder that an index names; see ``open_index``."""

    model: str | None
    trust_remote_code: bool
    device: str
    backend: BackendName
    threads: int | None
    base_url: str | None


def require_options(given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse options that are not known; a value, which may be a key, is not shown."""
    names = [*known]
    for name in given:
        if name not in names:
            raise ConfigError(
                f"the option {unknown(name, names)}; a key of an API comes from the environment "
                "alone (OPENAI_API_KEY)"
            )


def recorded_config(spec: Spec, **opening: Unpack[EncoderOpening]) -> EncoderConfig:
    """Return the configuration that loads a recorded encoder."""
    model, base_url = opening.get("model"), opening.get("base_url")
    local = ("device", "backend", "threads")
    options: dict[str, Any] = {name: value for name, value in opening.items() if name in local}
    options |= {"document_prompt": spec.document_prompt, "query_prompt": spec.query_prompt}
    options["model"] = spec.model if model is None else model
    if isinstance(spec, RemoteSpec):
        options |= {"base_url": _endpoint(spec, base_url), "dimensions": spec.dimensions}
        return EncoderConfig(**options, input_types=spec.input_types or None)
    if base_url is not None:
        raise ConfigError(
            f"--base-url is for a model behind an API, and the index has {spec.model!r}; leave it "
            "out"
        )
    called = f"{spec.model!r}" + (f" at revision {spec.revision!r}" if spec.revision else "")
    # "False" of an environment is true in Python.
    if spec.needs_code and opening.get("trust_remote_code") is not True:
        raise EncoderError(
            f"the encoder {called} runs Python code that comes with the model; if you trust that "
            "code, allow it with --trust-remote-code (in Python trust_remote_code=True, in a job "
            "file trust-remote-code = true)"
        )
    fixed = _COMMIT.fullmatch(spec.revision or "") is not None
    # Any other name depends on the current folder or on the hub's cache.
    if model is None and not (
        fixed or spec.revision == EMBEDDED or (not spec.revision and Path(spec.model).is_absolute())
    ):
        raise EncoderError(
            f"the manifest names the encoder {called}, which is neither an absolute folder nor a "
            "commit on the hub; name the model yourself with --model (in Python model=)"
        )
    # An index built with one commit of a model is searched with the same one.
    keeps = model is None or (model == spec.model and fixed)
    same = ["dtype", "code_revision"]
    if spec.pooling != SENTENCE_TRANSFORMERS:
        same += ["pooling", "layers", "max_length"]
    return EncoderConfig(
        revision=spec.revision if keeps else None,
        trust_remote_code=spec.needs_code,
        local_files_only=model is None,
        **options,
        **{name: getattr(spec, name) for name in same},
    )


def _endpoint(spec: RemoteSpec, asked: str | None) -> str | None:
    """Return where to ask: as the user says, since an index may come from anybody."""
    asked = asked or os.environ.get(BASE_URL, "").strip() or None
    if asked is None and spec.endpoint != OPENAI_URL:
        raise EncoderError(
            f"the encoder {spec.model} was asked at {spec.endpoint or 'another endpoint'}, "
            "and texts and keys are not sent where an index says; if you trust it, set the "
            f"variable {BASE_URL}, or where there is the option, add --base-url "
            f"{spec.endpoint or 'URL'} (in Python base_url=)"
        )
    return asked
