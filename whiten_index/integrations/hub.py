"""The Hugging Face hub: the transform of an index as a repository, with a card.

``QueryTransform.from_hub`` reads it. For other programs there is the transform as one matrix; with
the moments, any other width or exponent can be fitted.
"""

from pathlib import Path
from typing import Any

from whiten_index import __version__
from whiten_index.artifacts.atomic import scratch_folder
from whiten_index.artifacts.cached_storage import place_of
from whiten_index.artifacts.files import list_folder
from whiten_index.artifacts.manifest import MANIFEST
from whiten_index.encoding.models import EMBEDDED, EMBEDDED_NAMES
from whiten_index.encoding.spec import OPENAI_URL
from whiten_index.errors import ConfigError, StorageError, first_line, require_installed
from whiten_index.paths import plain_markdown
from whiten_index.search.query_transform import QueryTransform
from whiten_index.versions.published import MOMENTS, Version, with_published
from whiten_index.versions.version_manifest import VersionManifest
from whiten_index.whitening.moments import Moments

_CARD = Path(__file__).with_name("hub_card.md")


def push_transform(
    index: Path | str, name: str, *, k: int | None = None, verify: str = "full"
) -> dict[str, Any]:
    """Send the transform of a published index to the repository ``name``, in one commit.

    A repository that is not there is made, as public as the account makes them. Of a model in a
    folder the folder's name alone is sent. The token is that of the hub's own login.

    Return the ``commit`` and its ``url``, and ``dim``, ``k`` and ``query_digest`` of what was sent.

    Raises:
        ArtifactError: nothing is published there, or it is damaged.
        ConfigError: the repository has other files, or the name is none of a repository.
        StorageError: the hub cannot be reached, or refuses it.
    """
    require_installed("huggingface_hub", by="the hub", extra="encode")
    from huggingface_hub import CommitOperationAdd, HfApi, constants
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        # Of a name alone the client makes a repository of the user, and then looks for another.
        validate_repo_id(name if "/" in name else "")
    except HFValidationError as error:
        raise ConfigError(f"{name!r} names no repository of the hub; write USER/NAME") from error

    def read(version: Version) -> tuple[VersionManifest, QueryTransform, Moments]:
        version.check()
        moments = Moments.load(version.file(MOMENTS))
        return version.fields, QueryTransform.of_version(version), moments

    root, mirror = place_of(index)
    fields, found, moments = with_published(root, read, mirror, verify=verify)
    transform = QueryTransform(found.whitening, _public(found), version=found.version)
    transform = transform if k is None else transform.truncate(k)
    with scratch_folder() as scratch:
        folder = transform.save(scratch / "repository")
        digest = {"query_digest": transform.query_digest}
        transform.whitening.export().save(folder / "matrix.safetensors", facts=digest)
        moments.save(folder / MOMENTS)
        (folder / "README.md").write_text(_card(name, transform, fields), encoding="utf-8")
        files = [CommitOperationAdd(path.name, path) for path in list_folder(folder)]
        api = HfApi(library_name="whiten-index", library_version=__version__)
        message = f"Query digest {transform.query_digest}, by whiten-index {__version__}"
        try:
            api.create_repo(name, exist_ok=True)
            found = api.model_info(name)
            there = {each.rfilename for each in found.siblings or ()}
            _require_ours(name, there, {file.path_in_repo for file in files})
            done = api.create_commit(name, files, commit_message=message, parent_commit=found.sha)
        except ConfigError:
            raise
        except Exception as error:
            # The hub's client raises errors of several libraries here.
            raise StorageError(
                f"{name} cannot be pushed to {constants.ENDPOINT} ({first_line(error)}); check the "
                "name, the network, HF_ENDPOINT and HF_HUB_OFFLINE; to write there, log in with "
                "'hf auth login' or set HF_TOKEN"
            ) from error
    known = {"dim": transform.dim, "k": transform.k, **digest}
    return {"commit": done.oid, "url": done.commit_url, **known}


def _require_ours(name: str, there: set[str], ours: set[str]) -> None:
    """Refuse a repository with other files than this writes."""
    others = there - {".gitattributes"} - (ours if MANIFEST in there else set())
    if others:
        raise ConfigError(
            f"{name} has files that are not of a transform ({', '.join(sorted(others)[:3])}); name "
            "another repository"
        )


def _public(transform: QueryTransform) -> dict[str, Any]:
    """Return the facts of an encoder without the place of its model on this machine."""
    facts, spec = transform.encoder_facts, transform.spec
    plain = {**spec.to_json(), "model": spec.name} if spec else {}
    plain |= {"endpoint": ""} if plain.get("endpoint", OPENAI_URL) != OPENAI_URL else {}
    return {**facts, "query_encoder": plain or None} if "query_encoder" in facts else facts | plain


def _card(name: str, transform: QueryTransform, fields: VersionManifest) -> str:
    from huggingface_hub import ModelCardData

    spec, whitening, facts = transform.spec, transform.whitening, transform.whitening.describe()
    fetched = spec.model if spec and spec.revision not in (None, EMBEDDED) else None
    base = fetched or (EMBEDDED_NAMES[1] if spec and spec.revision else None)
    sources = ", ".join(sorted({Path(each).name for each in fields["corpus"]["source"]["sources"]}))
    rows = {
        "model": f"{spec.name}, pooling {spec.pooling}" if spec else "of an embedding column",
        "corpus": f"{sources}: {fields['rows']:,} rows",
        "transform": f"{facts['kind']}, exponent {facts['exponent']:g}, k = {transform.k}",
        "similarity": whitening.similarity,
        "variance kept": f"{facts['variance_kept']:.1%}",
        "query digest": transform.query_digest,
    }
    quality = fields.get("quality") or {}
    if quality.get("agreement_at_10") is not None and transform.k == fields["whitening"]["k"]:
        found, built = quality["agreement_at_10"], fields["factory"]["built"]
        rows["agreement@10"] = f"{found:.1%} with raw search, in an index {built}"
    head = ModelCardData(base_model=base, library_name="whiten-index", tags=["embeddings"])
    return _CARD.read_text("utf-8").format(
        head=head.to_yaml(),
        name=name,
        dim=transform.dim,
        k=transform.k,
        rows="\n".join(f"| {key} | {plain_markdown(value)} |" for key, value in rows.items()),
        model=f', model="{fetched}"' if fetched else "",
        unit=", scaled to unit length" * (whitening.similarity == "cosine")
        + ", of embeddings of unit length" * whitening.normalize_input,
    )
