"""Commands that list, roll back, prune, clean, compact and verify, and the nightly job."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from whiten_index.artifacts.files import exists
from whiten_index.cli import terminal
from whiten_index.cli.schema_options import (
    PATH,
    GroupedCommand,
    StrictCommand,
    given,
    json_option,
    schema_options,
    verify_option,
)
from whiten_index.errors import ArtifactError, StorageError
from whiten_index.options import flag_of
from whiten_index.pipeline.update_config import CertifyConfig
from whiten_index.progress import Progress, Stages

if TYPE_CHECKING:
    from whiten_index.versions.verify import VerifyReport

index_argument = click.argument("index", type=PATH)
store_argument = click.argument("store", metavar="INDEX|STORE", type=PATH)


def _store_of(place: str) -> str:
    """Return the store of an index, or the folder given if it is no index."""
    from whiten_index.artifacts.cached_storage import place_of
    from whiten_index.versions.published import (
        CURRENT,
        VERSIONS,
        read_current,
        read_version,
        require_there,
    )
    from whiten_index.versions.references import open_store

    root, mirror = place_of(place)
    mirror.latest(root / CURRENT)
    if not exists(root / CURRENT):
        return place
    version, remedy = read_current(root).version, "name the store itself"
    require_there(root, version, mirror)
    folder = root / VERSIONS / version
    with mirror.opened(folder, ()) as copy:
        published = replace(read_version(copy), folder=folder, mirror=mirror)
    found = open_store(published, given=None, reader="this command", remedy=remedy)
    return str(found.place)


def _stage(name: str) -> AbstractContextManager[Progress]:
    """Show how long a step takes, of which nobody knows how far it is."""
    return Stages(terminal.Bars()).stage(name, 0)


@click.command()
@click.argument("job", type=click.Path(dir_okay=False, readable=False, path_type=Path))
@click.option("--dry-run", is_flag=True, help="Only say what would be done, and how long it takes.")
@click.pass_context
def nightly(context: click.Context, job: Path, dry_run: bool) -> None:
    """Run the nightly JOB (TOML) of an index: update, push, prune, compact, gc, metrics.

    JOB has the options of update, keep-versions, gc, compact, metrics, and a [[push]] for each
    database. Steps after the update cannot undo it; the last line names those that failed.
    """
    from whiten_index.cli.nightly_job import run_nightly

    context.exit(run_nightly(job, dry_run=dry_run))


@click.command()
@index_argument
@verify_option("manifest", "Check every file's checksum, or sizes and the manifests only.")
@json_option
def versions(index: str, verify: str) -> None:
    """List the versions of INDEX: the published one, those to go back to, a candidate."""
    from whiten_index.versions.retention import list_versions

    found = list_versions(index, verify=verify)
    notes = [f"{each.name}: {why}" for each in found if (why := each.sound or each.unread)]
    if not any(each.published for each in found):
        notes.append(
            "CURRENT, or the version that it names, is missing or damaged; to publish another: "
            f"whiten-index rollback {index} --to VERSION"
        )
    report = {"versions": [asdict(each) for each in found]}
    columns = (
        "name", "rows", "bytes", "decision", "created", "published", "withdrawn", "candidate",
    )  # fmt: skip
    shown = [{name: each[name] for name in columns} for each in report["versions"]]
    terminal.show(report, terminal.describe({"versions": shown}), notes=notes)
    if unread := [each.name for each in found if each.unread]:
        raise StorageError(
            f"{', '.join(unread)} of {index} cannot be read, and may be sound; mend the disk or "
            "the permissions"
        )


@click.command()
@index_argument
@click.option(
    "--to", help="The version or its number. [default: the newest sound one before the published]"
)
@json_option
def rollback(index: str, to: str | None) -> None:
    """Publish an earlier version of INDEX again; the one left is kept, as withdrawn."""
    from whiten_index.versions.retention import rollback as roll

    rolled = asdict(roll(index, to=to))
    lines = [f"{index}: version {rolled['to']} published, instead of {rolled['left'] or 'none'}"]
    notes = [f"{name} was skipped: {why}" for name, why in rolled["skipped"].items()]
    notes += [rolled["note"]] * bool(rolled["note"])
    terminal.show(rolled, lines, notes=notes)


@click.command(cls=StrictCommand)
@index_argument
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    required=True,
    help="Versions to keep, the published one among them.",
)
@verify_option(help="How to check those that are kept, as damaged ones do not count.")
@json_option
def prune(index: str, keep: int, verify: str) -> None:
    """Remove versions of INDEX but the published one and the newest sound ones before it."""
    from whiten_index.versions.retention import prune as remove

    with _stage("prune"):
        pruned = asdict(remove(index, keep=keep, verify=verify))
    freed = f"{len(pruned['removed'])} versions removed, {terminal.in_words(pruned['bytes'])}"
    lines = (f"{index}: {freed}", *terminal.describe(pruned, "removed", "kept"))
    odd = "is a link, no folder, or has the name of no version, and was left alone"
    notes = [f"{path} {odd}" for path in pruned["strange"]]
    terminal.show(pruned, lines, notes=notes)


@click.command()
@store_argument
@click.option("--dry-run", is_flag=True, help="Only say what would be removed; nothing is locked.")
@click.option(
    "--forget",
    multiple=True,
    type=PATH,
    metavar="INDEX",
    help="An index built from STORE that is gone for good; may be repeated.",
)
@click.option(
    "--index",
    "indexes",
    multiple=True,
    type=PATH,
    metavar="DIR",
    help="An index built from STORE that was moved: what it needs is kept from now on.",
)
@click.option(
    "--keep-days",
    type=click.FloatRange(min=0),
    default=7.0,
    show_default=True,
    help="What nothing needs is kept for so long, as it may be of an encode that was interrupted.",
)
@json_option
def gc(
    store: str, dry_run: bool, forget: tuple[str, ...], indexes: tuple[str, ...], keep_days: float
) -> None:
    """Remove from STORE, or that of INDEX, what no corpus and no version of an index needs."""
    from whiten_index.versions.gc import gc_store

    store = _store_of(store)
    with _stage("gc"):
        found = gc_store(
            store, dry_run=dry_run, forget=forget, indexes=indexes, keep_days=keep_days
        )
    report = asdict(found)
    freed = "would be freed" if dry_run else "freed"
    lines = (
        f"{store}: {terminal.in_words(report['bytes'])} {freed}; what nothing needs and is younger "
        f"than {keep_days:g} days is kept",
        *terminal.describe({**report, "store": None, "dry_run": None}),
    )
    terminal.show(report, lines)


@click.command()
@store_argument
@json_option
def compact(store: str) -> None:
    """Join the small and partly unused segments of STORE, or that of INDEX; rows stay equal."""
    from whiten_index.versions.compaction import compact_store

    with _stage("compact"):
        report = compact_store(_store_of(store))
    terminal.show(asdict(report))
    report.require_sound()


@click.command(cls=GroupedCommand)
@index_argument
@schema_options(CertifyConfig, without=("index",))
@json_option
def certify(**options: Any) -> None:
    """Certify INDEX: what its searches lose to exact search of raw embeddings, with intervals.

    The published version gets the certificate. Without --queries and --qrels, words of documents
    ask for their document.
    """
    from whiten_index.pipeline.certify import certify_index

    said = certify_index(CertifyConfig(**given(options)), progress=terminal.Bars())
    terminal.show(said, _certificate_lines(said))


def _certificate_lines(said: Mapping[str, Any]) -> Iterator[str]:
    made = said["certificate"]
    yield f"{said['out']}: version {said['version']} published with its certificate"
    rows = [
        {
            "questions with": f"{each['by']} {each['value']}" if "by" in each else "all",
            "number": each["questions"],
            "points lost": f"{each['loss']:.2f}",
            "95 % interval": "{:.2f} to {:.2f}".format(*each["interval"]),
        }
        for each in (made, *made["strata"])
    ]
    yield from terminal.describe({"certificate": rows})
    yield (
        f"{made['measure']} is {made['index']:.2f}, and {made['raw']:.2f} by exact search of the "
        f"raw embeddings; no part measured loses more than {made['at_most']:.2f} points"
    )
    if made["strata_left_out"]:
        yield f"{made['strata_left_out']} parts have fewer than 30 questions and were left out"


@click.command()
@click.argument("paths", nargs=-1, required=True, type=PATH, metavar="PATH...")
@click.option("--certificate", is_flag=True, help="Also ask the questions of certificates again.")
@click.option("--queries", type=PATH, help="Queries of the certificate, if it is by judged ones.")
@click.option("--qrels", type=PATH, help="Judgements of these queries.")
@schema_options(CertifyConfig, only=("store", "model", "trust_remote_code"))
@json_option
def verify(paths: tuple[str, ...], certificate: bool, **options: Any) -> None:
    """Check every checksum of indexes and stores, and say how to mend what is damaged."""
    from whiten_index.versions.verify import verify_paths

    options = given(options)
    if options and not certificate:
        raise click.UsageError(f"{' and '.join(map(flag_of, options))} needs --certificate")
    with _stage("verify"):
        reports = verify_paths(paths)
    sound = all(report.sound for report in reports)
    found: dict[str, Any] = {"sound": sound, "reports": [report.to_json() for report in reports]}
    lines = [line for report in reports for line in _verify_lines(report)]
    if certificate and sound:
        from whiten_index.pipeline.certify import recertify

        for report in reports:
            if report.kind == "index":
                config = CertifyConfig(index=report.path, **options)
                made = recertify(config, progress=terminal.Bars())
                found.setdefault("certificates", []).append(made)
                lost = f"at most {made['at_most']:.2f} points of {made['measure']} are lost"
                lines.append(f"index {report.path}: its certificate holds, {lost}")
    terminal.show(found, lines)
    where = " and ".join(report.path for report in reports if not report.sound)
    if damages := sum(len(report.damages) for report in reports):
        raise ArtifactError(
            f"damage was found in {damages:,} places of {where}; each is named above with what "
            "mends it"
        )
    if unread := sum(len(report.unread) for report in reports):
        raise StorageError(
            f"{unread:,} files of {where} could not be read, and may be sound; each is named "
            "above: mend the disk or the permissions, and verify again"
        )


def _verify_lines(report: "VerifyReport") -> Iterator[str]:
    looked = ", ".join(f"{n:,} {kind.replace('_', ' ')}" for kind, n in report.checked.items() if n)
    counts = (("damaged", report.damages), ("not read", report.unread))
    found = ", ".join(f"{len(each):,} {how}" for how, each in counts if each) or "sound"
    size = terminal.in_words(report.bytes)
    yield f"{report.kind} {report.path}: {found} ({looked}; {size})"
    for note in report.notes:
        yield f"  note: {note}"
    for damage in (*report.damages, *report.unread):
        yield f"  {damage.path}\n    {damage.why}"
        yield f"    {damage.remedy}"
