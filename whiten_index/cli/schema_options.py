"""Click options made from the schemas of ``whiten_index.options``."""

import functools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from whiten_index.artifacts.files import read_bounded, reading
from whiten_index.artifacts.limits import TOML_BYTES, load_toml
from whiten_index.cli.terminal import choose
from whiten_index.errors import ConfigError
from whiten_index.options import (
    CORPUS,
    INDEX,
    MODEL,
    OUTPUT,
    RESOURCES,
    TRANSFORM,
    Option,
    flag_of,
    job_keys,
    options_of,
    unknown,
)
from whiten_index.paths import at_home, require_no_secret, shown

Command = TypeVar("Command", bound=Callable[..., Any])
_TYPES: "dict[type, click.ParamType[Any]]" = {int: click.INT, float: click.FLOAT}
_OTHER = "Other options"
# Groups of a command's own come before the resources.
_ORDER = (CORPUS, MODEL, TRANSFORM, INDEX, RESOURCES, OUTPUT, _OTHER)
_JOB = "whiten_index.job"
_ARGUMENTS = {"corpus": "CORPUS", "texts": "TEXT"}
# Keys whose values may be paths, in which ``~`` is the home folder.
_PATHS = {
    "canary_file", "corpus", "data", "dev", "folder", "forget", "index", "indexes", "metrics",
    "model", "old_model", "out", "paths", "qrels", "queries", "run", "run_out", "sets", "store",
    "target", "to", "token_file",
}  # fmt: skip
_NOT_IN_JOBS = ("as_json", "plan", "config", "help", "quiet", "verbose")


class StrictCommand(click.Command):
    """Command that names all that is missing in one error."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words of a command line; the values of a job file count too."""
        lenient = ctx.resilient_parsing
        try:
            rest = super().parse_args(ctx, list(args))
        except click.MissingParameter:
            # It stops at the first; once more, to see the others.
            ctx.resilient_parsing = True
            rest = super().parse_args(ctx, args)
        found = {**ctx.params, **ctx.meta.get(_JOB, {})}
        given = {name for name, value in found.items() if value not in (None, ())}
        stored, missing = "store" in given and "corpus" not in given, []
        for each in self.params:
            needed: tuple[str, ...] | None = getattr(each, "needed", () if each.required else None)
            # A store alone says nothing of a corpus.
            unasked = stored and getattr(each, "group", "") == CORPUS
            if needed is not None and not unasked and not given & {each.name, *needed}:
                own = each.opts[0] if isinstance(each, click.Option) else each.human_readable_name
                missing.append(" or ".join([own, *map(_shown, needed)]))
        if missing and not lenient:
            raise click.UsageError(f"missing: {', '.join(missing)}", ctx)
        return rest


def _shown(name: str) -> str:
    return _ARGUMENTS.get(name, flag_of(name))


class GroupedCommand(StrictCommand):
    """Command that lists its options under headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, those of each group under its heading, the others last."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                heading = getattr(parameter, "group", None) or _OTHER
                groups.setdefault(heading, []).append(record)
        places = {heading: place for place, heading in enumerate(_ORDER)}
        for heading in sorted(groups, key=lambda name: places.get(name, places[RESOURCES] - 0.5)):
            with formatter.section(heading):
                formatter.write_dl(groups[heading])


class GroupedOption(click.Option):
    """Option with the heading that it is listed under; for ``needed`` see ``Option``."""

    def __init__(self, *args: Any, group: str = "", needed: Any = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.group, self.needed = group, needed


def schema_options(
    made_from: type, *, only: Collection[str] | None = None, without: Collection[str] = ()
) -> Callable[[Command], Command]:
    """Return a decorator that adds the options of a schema, whose value is ``None`` if not given.

    ``only`` and ``without`` name the fields that the command offers, or does not.
    """
    fields = [
        each
        for each in options_of(made_from)
        if each.name not in without and (only is None or each.name in only)
    ]

    def decorate(command: Command) -> Command:
        for each in reversed(fields):
            command = _option(each)(command)
        return command

    return decorate


def with_options(*decorators: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Return a decorator that adds several options, shown in the order given."""
    return lambda command: functools.reduce(
        lambda wrapped, decorate: decorate(wrapped), reversed(decorators), command
    )


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the job file, and over them those of the command line."""
    job = click.get_current_context().meta.get(_JOB, {})
    return {**job, **{name: value for name, value in values.items() if value not in (None, ())}}


def read_toml(path: Path) -> dict[str, Any]:
    """Read a job file, with the home folder for ``~``; refuse it if a value may be a secret."""
    try:
        with reading(path):
            values = load_toml(read_bounded(path, limit=TOML_BYTES))
    except OSError as error:
        raise ConfigError(f"job file {path} cannot be read ({error}); check the path") from error
    except ValueError as error:
        raise ConfigError(f"job file {path} is not TOML in UTF-8 ({error}); mend it") from error
    require_no_secret(values, what=f"job file {path}")
    return {key: _with_home(key, value) for key, value in values.items()}


def _with_home(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_home(name, each) for name, each in value.items()}
    if isinstance(value, list):
        return [_with_home(key, each) for each in value]
    path = key.replace("-", "_") in _PATHS and isinstance(value, str) and value.startswith("~")
    return str(at_home(value)) if path else value


def paths_from(folder: Path, value: Any, *, mark: str = "://") -> Any:
    """Return paths of a job file as seen from the working folder.

    An address, which has ``mark`` in it, and what else is no path stay as they are.
    """
    if isinstance(value, list):
        return [paths_from(folder, each) for each in value]
    path = isinstance(value, str) and value and mark not in value
    return str(folder / value) if path else value


def rename_keys(
    values: Mapping[str, Any], names: Mapping[str, str], *, where: str
) -> dict[str, Any]:
    """Return a table of a job file by the names of fields, of which one may have several keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = names.get(key.replace("-", "_"))
        if name is None:
            known = [each.replace("_", "-") for each in names]  # as they are documented
            raise ConfigError(f"{where}: {unknown(key, known)}")
        if name in found:
            raise ConfigError(f"{where} sets {name} twice, once as {key}; leave one out")
        found[name] = value
    return found


def _read_job(
    context: click.Context, _: click.Parameter, path: str | None, *, all_by_click: bool = False
) -> None:
    if path is None:
        return
    from whiten_index.pipeline.build_options import BuildOptions

    own: dict[str, str] = {}
    params = {str(each.name): each for each in context.command.params}
    for name in params.keys() - set(_NOT_IN_JOBS):
        flags = [flag[2:].replace("-", "_") for flag in params[name].opts if flag[:2] == "--"]
        own |= dict.fromkeys([name, *flags], name)
    # One job serves a build and other commands, which ignore what only a build knows.
    known = {**job_keys(BuildOptions), **own}
    where = f"job file {path}"
    job = rename_keys(read_toml(Path(path)), known, where=where)
    context.meta[_JOB], context.default_map = checked, by_click = {}, {}
    for name in job.keys() & params.keys():
        # A schema checks its values, and click all others.
        if isinstance(params[name], GroupedOption) and not all_by_click:
            checked[name] = job[name]
        else:
            by_click[name] = _as_words(params[name], job[name], where=where)


def _as_words(parameter: click.Parameter, value: Any, *, where: str) -> list[str] | str:
    """Return a value of a job file as a command line has it."""
    several = parameter.nargs == -1 or getattr(parameter, "multiple", False)
    values = value if several and isinstance(value, list) else [value]
    if any(isinstance(each, list | dict) for each in values):
        raise ConfigError(
            f"{where} sets {parameter.name} to {shown(value)}, and one value is needed here; "
            "leave it out, or take another job file"
        )
    return [*map(str, values)] if several else str(value)


_CONFIG: dict[str, Any] = {
    "type": click.Path(dir_okay=False, readable=False),
    "is_eager": True,
    "expose_value": False,
    "help": "Job file (TOML) with values of the other options.",
}
config_option = click.option("--config", callback=_read_job, **_CONFIG)
# Of a command whose options are no schema.
_by_click = functools.partial(_read_job, all_by_click=True)
own_config_option = click.option("--config", callback=_by_click, **_CONFIG)
# A path that may be missing, or a URI: the command says what is wrong with it.
PATH = click.Path(readable=False)
json_option = click.option(
    "--json", "as_json", is_flag=True, expose_value=False, callback=choose,
    help="Print one JSON object on standard output.",
)  # fmt: skip
plan_option = click.option(
    "--plan", is_flag=True, help="Only say what would be done, how long and how many bytes."
)


def verify_option(
    default: str = "full",
    help: str = "Compare every file's checksum, or only its size, which misses flipped bits.",
) -> Callable[[Command], Command]:
    """Return the option that says how thoroughly files are checked."""
    kinds = click.Choice(["full", "manifest"], case_sensitive=False)
    return click.option("--verify", type=kinds, default=default, show_default=True, help=help)


def _option(each: Option) -> Callable[[Command], Command]:
    settings: dict[str, Any] = {
        "cls": GroupedOption,
        "group": each.group,
        "needed": each.needed,
        "help": _help(each),
        "default": None,
    }
    flag = each.flag
    if each.kind is bool:
        flag = flag if each.default is False else f"{flag}/--no-{flag[2:]}"
        settings["is_flag"] = True
    elif each.kind is tuple and each.commas:
        settings["callback"] = _numbers
        settings["metavar"] = "N,N,…"
    elif each.kind is tuple:
        settings["multiple"] = True
    elif each.choices:
        settings["type"] = click.Choice(each.choices, case_sensitive=False)
    else:
        settings["type"] = _TYPES.get(each.kind, click.STRING)
    return click.option(flag, each.name, **settings)


def _help(each: Option) -> str:
    default = each.shown
    if default is None and each.default not in (None, False, (), ""):
        value = "yes" if each.default is True else each.default
        default = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    notes = f" [default: {default}]" if default else ""
    if each.needed is not None:
        notes += f" [required{''.join(f' without {_shown(name)}' for name in each.needed)}]"
    return each.help + notes


def pairs(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    """Return name -> value of options ``NAME=VALUE``."""
    found = dict[str, str]()
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not equals:
            # What it is may be a secret.
            raise click.BadParameter("it takes NAME=VALUE; one was given without a name or =")
        if name in found:
            raise click.BadParameter(f"{name} was given twice; give it once")
        found[name] = value
    return found


def _numbers(_: click.Context, __: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not a list of numbers, such as 1,12") from error
