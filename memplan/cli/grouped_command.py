"""Commands whose options are parameters, or are declared in groups: frozen values, whose fields are the options."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, field, fields, is_dataclass
from inspect import Parameter, Signature, signature
from itertools import chain
from textwrap import fill
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from memplan.cli.option_groups import SELDOM_USED
from memplan.documents.frozen_values import dataclass
from memplan.errors import InvalidFileError

_DIGITS = re.compile(r"\d{1,15}", re.ASCII)
_UNSURE: Any = object()

ALL_HELP = "--help-all"
WIDEST_NAMES = 26
"""Columns that an option's names take at most before its help starts on a line of its own."""


@dataclass(frozen=True, slots=True)
class Variation:
    """How one command's group differs from the group as declared."""

    left_out: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)


def without(*names: str) -> Variation:
    """Return a mark for a group that lacks some of its options; they have their defaults.

    Example:
        >>> without("strict").left_out
        ('strict',)
    """
    return Variation(left_out=names)


def with_defaults(**defaults: Any) -> Variation:
    """Return a mark for a group that has other defaults."""
    return Variation(defaults=defaults)


def command(example: str) -> Callable[[Callable[..., int]], Callable[..., NoReturn]]:
    """Return a decorator for a command that takes options and groups of them, and returns an exit code."""

    def declared(function: Callable[..., int]) -> Callable[..., NoReturn]:
        hints = get_type_hints(function, include_extras=True)
        groups: dict[str, tuple[Any, list[Parameter]]] = {}
        parameters: list[Parameter] = []
        for one in signature(function).parameters.values():
            group, variations = _parted(hints[one.name])
            if is_dataclass(group):
                groups[one.name] = group, _parameters(group, variations)
                parameters += groups[one.name][1]
            else:
                parameters.append(one.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[one.name]))

        def run(**given: Any) -> NoReturn:
            values = {
                name: group(**{one.name: given.pop(one.name) for one in own}) for name, (group, own) in groups.items()
            }
            raise typer.Exit(function(**values, **given))

        run.__name__, run.__doc__ = function.__name__, function.__doc__
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        vars(run).update(__signature__=Signature(parameters), example=example)
        return run

    return declared


def add_command(app: typer.Typer, name: str, function: Callable[..., Any]) -> None:
    """Add a command to an application."""
    doc = " ".join((function.__doc__ or "").split())
    first = re.match(r".*?[.?!](?= |$)", doc)
    epilog = f"Example: {vars(function)['example']}"
    app.command(name, cls=GroupedCommand, epilog=epilog, short_help=first[0] if first else doc)(function)


class Commands(TyperGroup):
    """Commands that are called by name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse what stands before a command's name."""
        read_plainly(self.get_params(ctx))
        return super().parse_args(ctx, args)


class GroupedCommand(TyperCommand):
    """A command that shows its options in groups, and refuses one given twice where only one counts."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line."""
        ctx.meta[ALL_HELP] = ALL_HELP in args
        if not ctx.resilient_parsing and not set(args) & set(self.get_help_option_names(ctx)):
            _, _, order = self.make_parser(ctx).parse_args(args=list(args))
            _refuse_repeated(order)
            self.params = [one for one in self.params if one in order or one.required or one.envvar]
        read_plainly(self.get_params(ctx))
        return super().parse_args(ctx, args)

    def get_help_option_names(self, ctx: Any) -> list[str]:
        """Return what asks for help: in short, or with what options that are seldom used do."""
        return [*super().get_help_option_names(ctx), ALL_HELP]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options under the headings of their groups, and those seldom used by their names alone."""
        formatter.write_paragraph()
        sections: dict[str, list[Any]] = {}
        for parameter in self.get_params(ctx)[:-1]:  # the last is --help itself
            sections.setdefault(getattr(parameter, "rich_help_panel", None) or "Options", []).append(parameter)
        whole = ctx.meta.get(ALL_HELP, False)
        for heading, parameters in sections.items():
            if whole or heading not in SELDOM_USED:
                _write_section(formatter, heading, _rows(parameters, whole=whole))
        seldom = {} if whole else {heading: sections[heading] for heading in SELDOM_USED if heading in sections}
        if seldom:
            formatter.write(f"More, in {ALL_HELP}:\n")
        for heading, parameters in seldom.items():
            first = f"  {heading:{max(map(len, seldom))}}  "
            formatter.write(_hanging(first, ", ".join(chain(*map(_names, parameters))), formatter.width))


def _refuse_repeated(order: Iterable[Any]) -> None:
    """Refuse options given twice, but for repeatable ones and for a plain flag, which says the same twice."""
    seen = set()
    for parameter in order:
        plain = getattr(parameter, "is_flag", False) and not parameter.secondary_opts
        repeatable = parameter.param_type_name == "argument" or parameter.multiple or plain
        names = [one for one in (*parameter.opts, *parameter.secondary_opts) if one.startswith("--")]
        if parameter.name in seen and not repeatable:
            raise InvalidFileError([f"{'/'.join(names)}: given more than once; give it once"])
        seen.add(parameter.name)


# ------------------------------------------------------------------ groups
def _parted(hint: Any) -> tuple[Any, tuple[Variation, ...]]:
    """Return a group, and how a command's own differs from it."""
    if get_origin(hint) is Annotated:
        group, *marks = get_args(hint)
        return group, tuple(mark for mark in marks if isinstance(mark, Variation))
    return hint, ()


def _parameters(group: Any, variations: tuple[Variation, ...]) -> list[Parameter]:
    """Return the options of a group as parameters of a function."""
    hints = get_type_hints(group, include_extras=True)
    left_out = {name for variation in variations for name in variation.left_out}
    defaults = {name: value for variation in variations for name, value in variation.defaults.items()}
    unknown = (left_out | defaults.keys()) - {one.name for one in fields(group)}
    assert not unknown, f"{group.__name__} has no {unknown}"
    return [
        Parameter(
            one.name,
            Parameter.KEYWORD_ONLY,
            default=defaults.get(one.name, Parameter.empty if one.default is MISSING else one.default),
            annotation=hints[one.name],
        )
        for one in fields(group)
        if one.name not in left_out
    ]


# ------------------------------------------------------------------ values
class PlainValue:
    """Makes of plain values what typer would, without pydantic, whose import takes a fifth of a short answer.

    typer (0.29) has that judge every value, at an option's first. What is not plain here, and all that is wrong, is left to
    it; where typer has no such judge, nothing is asked here.
    """

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the value of what was typed."""
        known = _plain(value, param)
        if known is not _UNSURE:
            return known
        param._runtime_param = None
        try:
            return param.get_runtime_param().coerce(value, param=param, ctx=ctx)
        except typer.BadParameter as error:
            if isinstance(value, str) and repr(value) not in error.message:
                error.message = f"{error.message}, got {value!r}"
            raise


def read_plainly(parameters: Iterable[Any]) -> None:
    """Have plain values of options read here."""
    for one in parameters:
        if hasattr(one, "_runtime_param") and hasattr(one, "type_descriptor"):
            one._runtime_param = PlainValue()


def _plain(value: Any, param: Any) -> Any:
    """Return the value of a text or of several, or that it is not plain."""
    if value is None:
        return () if param.multiple or param.nargs == -1 else None
    about, kind = param.type_descriptor.parameter_info, param.type_descriptor.annotation
    if param.multiple:
        texts = kind == list[str] and all(isinstance(one, str) for one in value)
        return [*value] if texts and about.parser is None else _UNSURE
    if not isinstance(value, str):
        return _UNSURE if about.parser is None else value  # a default, which was parsed by who wrote it
    if about.parser is not None:
        try:
            return about.parser(value)
        except (ValueError, AssertionError):
            return _UNSURE
    if kind is str:
        return value
    if kind is int and _DIGITS.fullmatch(value) and not about.clamp:
        number, least, most = int(value), about.min, about.max
        return number if (least is None or least <= number) and (most is None or number <= most) else _UNSURE
    return value if get_origin(kind) is Literal and value in get_args(kind) else _UNSURE


# ------------------------------------------------------------------ help
def _hanging(first: str, text: str, width: int) -> str:
    """Return lines of a text behind the first column's, not broken at the hyphens of options' names."""
    indent = " " * len(first)
    return f"{fill(text, width, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)}\n"


def _write_section(formatter: Any, heading: str, rows: list[tuple[str, str]]) -> None:
    """Write rows of two columns under a heading."""
    widest = max((len(names) for names, _ in rows if len(names) <= WIDEST_NAMES), default=WIDEST_NAMES)
    formatter.write(f"{heading}:\n")
    with formatter.indentation():
        formatter.write_dl(rows, col_max=widest)


def _rows(parameters: Iterable[Any], *, whole: bool) -> list[tuple[str, str]]:
    """Return names and help; neighbours that share their help share a row."""
    rows: list[tuple[list[str], Any]] = []
    for parameter in parameters:
        if rows and rows[-1][1].help == parameter.help:
            rows[-1] = ([*rows[-1][0], *_names(parameter)], parameter)
        else:
            rows.append((_names(parameter), parameter))
    return [(f"{', '.join(names)}{_value(last)}", _help(last, whole=whole)) for names, last in rows]


def _names(parameter: Any) -> list[str]:
    """Return an argument's word, or an option's letter and name, and what turns a flag off."""
    if parameter.param_type_name == "argument":
        return [parameter.metavar or parameter.name.upper()]
    short = [name for name in parameter.opts if not name.startswith("--")]
    return [*short, *_long(parameter)[:1], *parameter.secondary_opts]


def _long(parameter: Any) -> list[str]:
    return [name for name in parameter.opts if name.startswith("--")]


def _value(parameter: Any) -> str:
    """Return the word for an option's value."""
    if parameter.param_type_name == "argument" or parameter.is_flag:
        return ""
    return f" {parameter.metavar or 'N'}"


def _help(parameter: Any, *, whole: bool) -> str:
    """Return an option's help, or its first sentence, with its other names, its default and its environment variable."""
    option = parameter.param_type_name == "option"
    notes = [f"also {', '.join(_long(parameter)[1:])}"] if option and _long(parameter)[1:] else []
    shown = option and not parameter.is_flag and parameter.default not in (None, (), "") and parameter.show_default
    notes += [f"default {getattr(parameter.default, 'value', parameter.default)}"] if shown else []
    notes += [f"or ${parameter.envvar}"] if parameter.envvar else []
    text = (parameter.help or "").removesuffix(".")
    text = text if whole else text.partition(". ")[0]
    return f"{text} ({'; '.join(notes)})." if notes else f"{text}."
