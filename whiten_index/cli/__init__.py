"""``whiten-index``: click commands; each parses, calls one function, and shows its report.

The epilog of ``--help`` lists the exit statuses; 1 is an error that nobody foresaw.
"""

import atexit
import errno
import gc
import sys
from typing import Any

import click

import whiten_index
from whiten_index.artifacts.files import unforeseen
from whiten_index.cli import (
    commands,
    demo,
    export_commands,
    maintenance_commands,
    measure_commands,
    terminal,
)
from whiten_index.cli.schema_options import own_config_option
from whiten_index.cli.signals import INTERRUPTED, raise_if_interrupted, status_of, stop_on_signals
from whiten_index.cli.streams import guarded, open_closed_descriptors, print_exception
from whiten_index.errors import ConfigError, PartialFailureError, WhitenIndexError
from whiten_index.paths import cell, require_no_secret, require_plain_environment

_SECTIONS: dict[str, tuple[click.Command, ...]] = {
    "Build and search": (
        demo.demo,
        commands.build,
        commands.encode,
        commands.search,
        commands.serve,
        commands.inspect,
        export_commands.export,
        export_commands.push,
    ),
    "Keep up to date": (
        commands.update,
        commands.migrate,
        maintenance_commands.nightly,
        maintenance_commands.versions,
        maintenance_commands.rollback,
    ),
    "Measure": (
        measure_commands.sweep,
        measure_commands.report,
        measure_commands.evaluate,
        maintenance_commands.certify,
        measure_commands.train,
    ),
    "Maintain": (
        maintenance_commands.prune,
        maintenance_commands.gc,
        maintenance_commands.compact,
        maintenance_commands.verify,
    ),
}


class _Commands(click.Group):
    """Turns this package's errors into one line on standard error and their exit status."""

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        for section, members in _SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl(
                    [(str(each.name), each.get_short_help_str(limit=90)) for each in members]
                )

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        # Before click names a value in an error.
        option = "an argument"
        try:
            require_plain_environment()
            for each in args:
                name, _, value = each.partition("=") if each.startswith("-") else (option, "", each)
                require_no_secret(value, what=name)
                option = each if each.startswith("-") else "an argument"
        except ConfigError as error:
            click.echo(f"Error: {error}", err=True)
            context.exit(error.exit_code)
        return super().parse_args(context, args)

    def main(self, *args: Any, **options: Any) -> Any:
        with guarded() as streams:
            try:
                return super().main(*args, **options)
            except SystemExit as ended:
                if not isinstance(ended.code, int | None):
                    raise
                raise SystemExit(streams.end(status_of(ended.code or 0))) from None

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except WhitenIndexError as error:
            click.echo(f"Error: {cell(error)}", err=True)
            if isinstance(error, PartialFailureError) and terminal.CHOSEN["as_json"]:
                terminal.print_json({"error": str(error), "failed": error.items})
            context.exit(error.exit_code)
        except Exception as error:
            # A library may have made another error of it. A job that exits has said what it was.
            if not isinstance(error, click.exceptions.Exit):
                raise_if_interrupted()
            failed = unforeseen(error, step=str(context.invoked_subcommand))
            if failed is None or (isinstance(error, OSError) and error.errno == errno.EPIPE):
                raise
            click.echo(f"Error: {cell(failed)}", err=True)
            context.exit(failed.exit_code)
        except KeyboardInterrupt as stopped:
            kept = str(stopped) or "kept what was finished and is on disk"
            click.echo(f"Stopped: {kept}; run the same command to go on.", err=True)
            context.exit(INTERRUPTED)


@click.group(
    cls=_Commands,
    # With colour click removes no escapes: these are shown.
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "color": True,
    },
    epilog="Exit status: 0 done, 2 options, 3 corpus or queries, 4 encoder, 5 damaged or missing "
    "artifact, 6 folder in use, 7 disk or bucket, 8 whitening impossible, 9 kept back by a gate, "
    "10 database, 11 cluster, 12 shards failed, 130 interrupted, 141 broken pipe.",
)
@click.version_option(whiten_index.__version__, prog_name="whiten-index")
def cli() -> None:
    """Build and search whitened FAISS indexes of Parquet corpora."""


# Command -> what follows its name in the example of its help.
_EXAMPLES = {
    "build": "docs.parquet --text-column text --id-column id --out index",
    "search": "index 'how do I catch an error' --top-k 3 --filter \"lang = 'en'\"",
    "export": "index whitening.safetensors",
    "migrate": "index --model intfloat/multilingual-e5-small --rows 50000 --bridge",
    "certify": "index --queries queries.jsonl --qrels qrels.tsv --by lang",
    "push": "index --to postgresql://me@localhost/news --table docs",
    "update": "index docs.parquet --dry-run",
    "sweep": "docs.parquet --text-column text --out swept",
}


def _complete(command: click.Command) -> None:
    """Add what every command has: an example, ``--config``, and how much is said."""
    if example := _EXAMPLES.get(str(command.name)):
        command.epilog = f"Example: whiten-index {command.name} {example}"
    said: dict[str, Any] = {"is_flag": True, "expose_value": False, "callback": terminal.choose}
    for each in getattr(command, "commands", {"": command}).values():
        if not {"config", "job"} & {parameter.name for parameter in each.params}:
            own_config_option(each)
        each.params += [
            click.Option(["-q", "--quiet"], help="Show warnings and the result alone.", **said),
            click.Option(
                ["-v", "--verbose"], help="Show the seconds of each stage, and every fact.", **said
            ),
        ]


for members in _SECTIONS.values():
    for command in members:
        _complete(command)
        cli.add_command(command)


def main() -> None:
    """Run the command line."""
    open_closed_descriptors()
    sys.excepthook = lambda _, error, __: print_exception(error)
    # torch and transformers make a million lasting objects. By default Python walks them often.
    gc.set_threshold(200_000, 20, 100)
    # At the end it would walk them once more; this handler runs after all others.
    atexit.register(gc.freeze)
    stop_on_signals()
    cli.main(args=sys.argv[1:])
