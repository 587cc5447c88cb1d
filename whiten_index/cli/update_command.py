"""``whiten-index update``: parse, call one function, print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from whiten_index.cli import terminal
from whiten_index.cli.schema_options import (
    GroupedCommand,
    given,
    json_option,
    log_option,
    schema_options,
)
from whiten_index.errors import GateError
from whiten_index.pipeline.update_config import UpdateConfig


@click.command(cls=GroupedCommand)
@click.argument("corpus", nargs=-1)
@schema_options(UpdateConfig)
@log_option
@click.option("--dry-run", is_flag=True, help="Only say what would be done, and how long it takes.")
@json_option
def update(dry_run: bool, log: str | None, as_json: bool, **options: Any) -> None:
    """Bring --index up to date with its CORPUS; left out, the one that it was built from.

    Rows are identified by id and text; known texts are not encoded again. The new version is
    published only where every gate passes, else kept aside (exit status 9). --dry-run ends with 9
    too where a gate would keep it back for its rows or bytes, or the corpus is that of a version
    which was rolled back. With --json what is refused says why in "refused".
    """
    if log is not None and as_json:
        raise click.UsageError("--log prints the report as its last line; leave --json out")
    from whiten_index.pipeline.plan import plan_update
    from whiten_index.pipeline.update import update_index

    options = given(options)
    if "index" not in options:
        raise click.UsageError("name the index to bring up to date: --index DIR")
    config = UpdateConfig(**options)
    if log is not None:
        _logged(config, log, dry_run=dry_run)
        return
    try:
        if dry_run:
            said = plan_update(config, progress=terminal.Bars()).to_json()
        else:
            said = update_index(config, progress=terminal.Bars(facts=not as_json)).to_json()
    except GateError as error:
        if as_json:
            found = {"candidate": error.candidate, "gates": error.gates} if error.gates else {}
            terminal.print_json({"refused": str(error), **found})
        else:
            _print_gates(error.gates)
        raise
    if as_json:
        terminal.print_json(said)
    else:
        _print_plan(said) if dry_run else _print_report(said)
    if said.get("refused"):
        raise GateError(f"nothing would be published: {said['refused']}")


def _logged(config: Any, form: str, *, dry_run: bool) -> None:
    from whiten_index.cli.log_lines import Ending, LogLines, run_job
    from whiten_index.pipeline.plan import plan_update
    from whiten_index.pipeline.update import update_index

    lines = LogLines(form)

    def work() -> Ending:
        if dry_run:
            event, said = "planned", plan_update(config, progress=lines).to_json()
        else:
            report = update_index(config, progress=lines)
            event = "up_to_date" if report.up_to_date else "published"
            said = report.to_json()
        return Ending(event, said, GateError.exit_code if said.get("refused") else 0)

    click.get_current_context().exit(run_job(work, kept="shards", lines=lines))


def _print_report(report: Mapping[str, Any]) -> None:
    done = "published"
    if report["up_to_date"]:
        done = f"is up to date, {terminal.done_anyhow(report['counts'])}"
    click.echo(f"{report['out']}: version {report['version']} {done}")
    _print_changes(report)
    click.echo("rows")
    # Those of files that were not read are among them.
    named = {"read": "in the corpus"}
    counted = terminal.count_rows(report["counts"])
    click.echo(terminal.table((named.get(what, what), *n) for what, *n in counted))
    for line in _decision_lines(report):
        click.echo(line)
    _print_gates(report["gates"])
    click.echo("time")
    click.echo(terminal.table(terminal.stage_rows(report["seconds"], report["stage_rows"])))


def _print_gates(gates: Sequence[Mapping[str, Any]]) -> None:
    if gates:
        click.echo("gates")
        click.echo(terminal.table(gate_rows(gates)))


def _print_changes(report: Mapping[str, Any]) -> None:
    files = report["files"]
    click.echo(
        f"  {_changes(report['rows'])}; {files['read']:,} files read, {files['skipped']:,} skipped"
    )


def _changes(rows: Mapping[str, int]) -> str:
    return (
        f"{rows['new']:,} new, {rows['changed']:,} changed, {rows['document']:,} with other kept "
        f"columns, {rows['deleted']:,} deleted, {rows['unchanged']:,} as they were"
    )


def update_lines(fields: Mapping[str, Any]) -> list[str]:
    """Return what a manifest says of the update that made a version, nothing where a build did."""
    update = fields.get("update")
    if not update:
        return []
    lines = [f"update of version {update['base']}"]
    if update.get("rows"):
        lines.append(f"  {_changes(update['rows'])}")
    lines += _decision_lines(update)
    if gates := fields.get("gates"):
        lines += ["gates", terminal.table(gate_rows(gates))]
    return lines


def _decision_lines(update: Mapping[str, Any]) -> list[str]:
    lines = []
    if decision := update.get("decision"):
        why = f"; {decision['index_why']}" if decision.get("index_why") else ""
        lines.append(f"  transform: {decision['whitening']}; {decision['why']}")
        lines.append(f"  index: {decision['index']}{why}")
    if drift := update.get("drift"):
        lines.append(terminal.table(drift_rows(drift)))
    return lines


def drift_rows(drift: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the figures of drift as table rows."""
    named = {
        "kl_per_dim": "KL divergence, nats per dimension",
        "noise_kl": "  to expect by chance",
        "mean_shift": "shift of the mean, in standard deviations",
        "variance_kept": "variance kept today",
        "variance_possible": "  by a transform fitted today",
    }
    shown = [(words, drift[name]) for name, words in named.items() if drift.get(name) is not None]
    return [(words, f"{value:.4g}") for words, value in shown]


def gate_rows(gates: Any) -> list[tuple[str, str]]:
    """Return the findings of gates as table rows."""
    return [(gate["name"], "passed" if gate["passed"] else gate["why"]) for gate in gates]


def _print_plan(plan: Mapping[str, Any]) -> None:
    click.echo(f"plan (nothing was written), from version {plan['base']}")
    _print_changes(plan)
    if plan["up_to_date"]:
        lost = f"{terminal.counted(plan['to_encode'], 'row')} that the store has lost to encode"
        click.echo(f"  up to date, {lost if plan['to_encode'] else 'nothing to do'}")
        if not plan["to_encode"]:
            return
    rate = plan["rows_per_second"]
    encoding = "-" if rate is None else terminal.duration(plan["encode_seconds"])
    rows = [
        ("rows to encode", f"{plan['to_encode']:,}"),
        ("encoding", encoding),
        ("  measured on a sample", "-" if rate is None else f"{rate:,.0f} rows/s"),
        ("all else, as it took before", terminal.duration(plan["other_seconds"])),
    ]
    if not plan["up_to_date"]:
        refit = {"auto": "if it drifted"}.get(plan["refit"], plan["refit"])
        rows.append(("transform fitted again", refit))
    for path, size in plan["bytes"].items():
        free = plan["free"][path]
        left = "" if free is None else f" of {terminal.in_words(free)} free"
        rows.append((f"bytes in {path}", f"{terminal.in_words(size)}{left}"))
    click.echo(terminal.table(rows))
