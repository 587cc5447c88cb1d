"""Row filters: ``lang == 'en' and year >= 2020`` becomes a pyarrow expression.

The text is parsed as a Python expression and only comparisons, ``in``, ``is None``, ``and``,
``or`` and ``not`` over columns and literals are translated: nothing is ever evaluated. As in SQL, a
null satisfies no comparison, neither ``==`` nor ``!=``, neither ``in`` nor ``not in``. Numbers are
rounded as a column of floats is: ``score == 0.1`` finds 0.1 in float32 too.
SQL's words are understood too: ``lang = 'en' AND day >= '2024-01-31' AND title IS NOT NULL``.
Dates and times are texts, ``day >= '2024-01-31'``, and columns whose names are no words of Python
are written ``column('my column')``.
"""

import ast
import datetime
import functools
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from whiten_index.errors import ConfigError, CorpusError
from whiten_index.paths import cut, shown

_Types = Mapping[str, pa.DataType]
_COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt,
    ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
# Strings and words of a condition, and what is between them.
# A string that does not end goes to the end of the text, which is looked through once.
_PARTS = re.compile(
    r"""'(?:[^'\\]|\\.|\\\Z)*(?:'|\Z)|"(?:[^"\\]|\\.|\\\Z)*(?:"|\Z)|\w+|\s+|<>|[<>=!]=?|.""",
    re.DOTALL,
)
_SQL = {
    "AND": "and", "OR": "or", "NOT": "not", "IN": "in", "IS": "is", "NULL": "None", "TRUE": "True",
    "FALSE": "False", "=": "==", "<>": "!=",
}  # fmt: skip
_NOT_UNDERSTOOD = (SyntaxError, ValueError, TypeError, OverflowError, RecursionError, MemoryError)
# Arrow compares term by term, and recurses into what nests until the stack ends.
_MOST_TERMS, _MOST_LEVELS, _MOST_CHARACTERS = 1_000, 100, 4 << 20
# Beyond every column of integers, and within a decimal.
_BEYOND = 10**30
_EPOCH, _LONGEST_TIME = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC), 64
_UNITS = {"s": 10**9, "ms": 10**6, "us": 1000, "ns": 1}  # nanoseconds
# Decimals that Python leaves out: three of a time, and any.
_NANOSECONDS = re.compile(r"(?:^|[^\d:+-])[\d:]+[.,]\d{6}(\d{1,3})(?!\d)")
_LEFT_OUT = re.compile(r"[.,]\d{7}")
_TOO_DEEP = f"it nests more than {_MOST_LEVELS} levels"


@dataclass(frozen=True)
class RowFilter:
    """A condition on columns."""

    text: str  # as the user wrote it
    columns: tuple[str, ...]  # the columns it reads
    _tree: ast.expr = field(repr=False, compare=False)

    @classmethod
    def parse(cls, text: str) -> "RowFilter":
        """Translate ``text``."""
        if not isinstance(text, str):
            raise ConfigError(f"a row filter is a text; {shown(text)} was given")
        named = repr(cut(text, most=200))
        try:
            if len(text) > _MOST_CHARACTERS:
                raise ValueError(f"it has more than {_MOST_CHARACTERS:,} characters")
            tree = ast.parse(_as_python(text.strip()), mode="eval").body
            _require_limits(tree)
            _condition(tree, {})
        except _NOT_UNDERSTOOD as error:
            why = cut(error.msg if isinstance(error, SyntaxError) else str(error), most=200)
            if isinstance(error, SyntaxError) and error.text and error.offset:
                why += f" at {cut(error.text[error.offset - 1 :], most=40)!r}"
            if isinstance(error, RecursionError | MemoryError) or "nested" in why:
                why = _TOO_DEEP
            raise ConfigError(
                f"the row filter {named} is not understood ({why}); write conditions such as "
                "lang == 'en' and (year >= 2020 or source in ['a', 'b']) and title is not None, "
                "day >= '2024-01-31', or column('my column') > 1"
            ) from error
        # The names of calls are names of the syntax tree too.
        calls = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        nodes = (each for each in ast.walk(tree) if isinstance(each, ast.expr))
        found = (_column_name(node) for node in nodes if id(node) not in calls)
        names = {name for name in found if name is not None}
        return cls(text, tuple(sorted(names)), tree)

    def mask(self, rows: pa.Table | pa.RecordBatch) -> NDArray[np.bool_]:
        """Return which rows (n,) the condition holds for."""
        # No column of the condition has a name as long.
        number = max((*self.columns, ""), key=len) + "#"
        columns = {name: _plain_integers(rows.column(name)) for name in self.columns}
        table = pa.table({**columns, number: np.arange(rows.num_rows)})
        try:
            passing = table.filter(_translated(self, table.schema)).column(number)
        except MemoryError:
            # Arrow's is an ``ArrowException`` too.
            raise
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise CorpusError(
                f"the row filter {cut(self.text, most=200)!r} does not fit the columns "
                f"({str(error).splitlines()[0]}); compare a column with a value of its own type"
            ) from error
        mask = np.zeros(rows.num_rows, dtype=np.bool_)
        mask[passing.to_numpy()] = True
        return mask


@functools.lru_cache(maxsize=8)
def _translated(chosen: RowFilter, columns: pa.Schema) -> pc.Expression:
    """Return a filter for some columns; a list of many values takes seconds."""
    return _condition(chosen._tree, dict(zip(columns.names, columns.types, strict=True)))


def _as_python(text: str) -> str:
    """Return a condition in which SQL's words and signs are those of Python."""
    found, before, lists = [""], "", list[bool]()
    for part in _PARTS.findall(text):
        if part[0] in "'\"" and found[-1].endswith(part[0]):
            # SQL doubles a quote within a string.
            found[-1] = found[-1][:-1] + "\\"
            found.append(part)
            continue
        null = before.lower() in ("is", "not") and part.lower() == "null"
        before, last = before if part.isspace() else part, before
        if part == "(":
            lists.append(last == "IN")
            part = "[" if lists[-1] else part
        elif part == ")" and lists and lists.pop():
            part = "]"
        found.append("None" if null else _SQL.get(part, part))
    return "".join(found)


def _plain_integers(column: Any) -> Any:
    """Return a column of integers without its dictionary, which Arrow does not compare well."""
    dictionary = pa.types.is_dictionary(column.type)
    if dictionary and pa.types.is_integer(column.type.value_type):
        return column.cast(column.type.value_type)
    return column


def _require_limits(tree: ast.expr) -> None:
    """Raise ``ValueError`` for too many terms or levels, which Arrow could not compute."""
    terms, level = 0, [tree]
    for _ in range(_MOST_LEVELS):
        inside: list[ast.expr] = []
        for node in level:
            if isinstance(node, ast.BoolOp):
                inside += node.values
            elif isinstance(node, ast.UnaryOp):
                inside.append(node.operand)
            else:
                terms += len(node.ops) if isinstance(node, ast.Compare) else 1
        if terms > _MOST_TERMS:
            raise ValueError(
                f"it has more than {_MOST_TERMS:,} terms; compare a column with many values by "
                "'in [...]', which may list any number"
            )
        if not inside:
            return
        level = inside
    raise ValueError(_TOO_DEEP)


def _joined(combine: Callable[[Any, Any], Any], parts: list[Any]) -> Any:
    """Join conditions two by two, so that the expression nests least."""
    while len(parts) > 1:
        pairs = [combine(*parts[i : i + 2]) for i in range(0, len(parts) - 1, 2)]
        parts = pairs + parts[2 * len(pairs) :]
    return parts[0]


def _condition(node: ast.expr, types: _Types) -> Any:
    """Return the pyarrow expression of a condition on columns of known, or unknown, types."""
    if isinstance(node, ast.BoolOp):
        combine = operator.and_ if isinstance(node.op, ast.And) else operator.or_
        return _joined(combine, [_condition(each, types) for each in node.values])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return ~_condition(node.operand, types)
    if isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        if all(_column_name(each) is None for each in operands):
            raise ValueError(f"{ast.unparse(node)} names no column; write lang, or column('lang')")
        links = zip(operands, node.ops, operands[1:], strict=False)
        return _joined(operator.and_, [_link(*link, types) for link in links])
    if (name := _column_name(node)) is not None:
        return pc.field(name)
    raise ValueError(f"{ast.unparse(node)!r} is no condition")


def _link(left: ast.expr, op: ast.cmpop, right: ast.expr, types: _Types) -> Any:
    if isinstance(op, ast.In | ast.NotIn):
        found = _value(left, right, types)
        members = _members(right, _type_of(left, types))
        among = found.isin(members) if len(members) else pc.scalar(False)
        # A null is among no members, and not outside them either.
        among = pc.if_else(found.is_null(), pa.scalar(None, pa.bool_()), among)
        return among if isinstance(op, ast.In) else ~among
    if isinstance(op, ast.Is | ast.IsNot):
        if not (isinstance(right, ast.Constant) and right.value is None):
            raise ValueError("'is' takes None only")
        missing = _value(left, right, types).is_null()
        return ~missing if isinstance(op, ast.IsNot) else missing
    return _COMPARE[type(op)](_value(left, right, types), _value(right, left, types))


def _members(node: ast.expr, column: pa.DataType | None) -> list[Any] | pa.Array:
    if not isinstance(node, ast.List | ast.Tuple | ast.Set):
        raise TypeError("'in' takes a list")
    members = list(map(_literal, node.elts))
    if column is not None and (numbers := _numbers(column)) is not None:
        members = [each if each is None else _moment(each, column) for each in members]
        column = numbers
    # Bytes may be text nobody declared.
    texts = (None, pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
    for member in members:
        # Arrow reads numbers and dates out of strings here, though not with ==.
        if isinstance(member, str) and column not in texts:
            raise TypeError(f"{member!r} is text and the column holds {column}")
    fitting = [_rounded(member, column) for member in members]
    if column is not None and pa.types.is_decimal(column):
        return [each for each in fitting if not isinstance(each, Decimal) or _fits(each, column)]
    if column is not None and pa.types.is_integer(column):
        return pa.array([each for each in fitting if not isinstance(each, Decimal)], column)
    if column is not None and pa.types.is_floating(column):
        # Arrow takes a number that the column has no room for as infinite here, and 0.0 and -0.0
        # for two values, though not with ==.
        most = float(np.finfo(f"float{column.bit_width}").max)
        held = [each for each in fitting if each is None or not most < abs(each) < math.inf]
        return [*held, *((0.0, -0.0) if 0 in held else ())]
    # Whole numbers and others, of which the column's type would make one kind.
    mixed = column is None and {type(each) for each in fitting} >= {int, float}
    return fitting[:1] if mixed else fitting


def _fits(number: Decimal, column: Any) -> bool:
    """Return whether a column of decimals has room for a number, as Arrow requires in a list."""
    decimals = -int(number.normalize().as_tuple().exponent)
    most = 10 ** (int(column.precision) - int(column.scale))
    return decimals <= int(column.scale) and abs(number) < most


def _value(node: ast.expr, other: ast.expr, types: _Types) -> Any:
    """Return a column or a literal, as it is compared with ``other``."""
    if (name := _column_name(node)) is not None:
        kind, found = _type_of(node, types), pc.field(name)
        numbers = _numbers(kind) if _column_name(other) is None else None
        return found if numbers is None else found.cast(kind).cast(numbers)
    value, column = _literal(node), _type_of(other, types)
    if value is None:
        raise ValueError("compare with None by 'is None' or 'is not None'")
    if column is not None and (numbers := _numbers(column)) is not None:
        value, column = _moment(value, column), numbers
    value = _rounded(value, column)
    # Arrow takes a whole number for an int64, which not all of a uint64 are.
    unsigned = column == pa.uint64() and type(value) is int
    return pc.scalar(pa.scalar(value, column) if unsigned else value)


def _numbers(column: pa.DataType | None) -> pa.DataType | None:
    """Return the type of the numbers that a column of dates or times holds, None for others.

    Arrow compares times of two units as far as they fit into the finer one, and not in two zones.
    """
    of_time = pa.types.is_timestamp, pa.types.is_date, pa.types.is_time
    if column is None or not any(each(column) for each in of_time):
        return None
    return pa.int32() if column.bit_width == 32 else pa.int64()


def _moment(text: Any, column: pa.DataType) -> int | Decimal:
    """Return the number of a date or time in a column; half way for one between two of them."""
    if not isinstance(text, str) or len(text) > _LONGEST_TIME:
        raise TypeError(f"{shown(text)} is no date or time; write one as '2024-01-31'")
    if pa.types.is_date(column):
        days = datetime.date.fromisoformat(text).toordinal() - _EPOCH.toordinal()
        return days if column.bit_width == 32 else days * 86_400_000
    zoned = pa.types.is_timestamp(column) and column.tz is not None
    if pa.types.is_timestamp(column):
        moment = datetime.datetime.fromisoformat(text)
    else:
        moment = datetime.datetime.combine(_EPOCH, datetime.time.fromisoformat(text))
    if moment.tzinfo is not None and not zoned:
        raise ValueError(f"{text!r} has a zone, and the column has none")
    # Python leaves out what is below a microsecond.
    fine = _NANOSECONDS.search(text)
    if len(_LEFT_OUT.findall(text)) > (fine is not None):
        raise ValueError(f"{text!r} has more than nine decimals")
    since = moment.replace(tzinfo=moment.tzinfo or datetime.UTC) - _EPOCH
    nanoseconds = since // datetime.timedelta(microseconds=1) * 1000
    nanoseconds += int(fine[1].ljust(3, "0")) if fine else 0
    whole, rest = divmod(nanoseconds, _UNITS[column.unit])
    return whole + Decimal("0.5") if rest else whole


def _rounded(value: Any, column: pa.DataType | None) -> Any:
    """Return a number as the column would hold it, or one that compares alike."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return value
    if column is None:
        return float(value) if abs(value) >= 1 << 63 else value
    if pa.types.is_integer(column) and math.isfinite(value):
        whole = max(-_BEYOND, min(math.floor(value), _BEYOND))
        if whole != value and abs(whole) < _BEYOND:
            return Decimal(whole) + Decimal("0.5")
        held = np.iinfo(str(column))
        return whole if held.min <= whole <= held.max else Decimal(whole)
    if pa.types.is_decimal(column) and math.isfinite(value):
        return Decimal(str(value))
    if not pa.types.is_floating(column):
        return value
    with np.errstate(over="ignore"):
        rounded = float(np.dtype(f"float{column.bit_width}").type(float(value)))
    return rounded if np.isfinite(rounded) else float(value)


def _type_of(node: ast.expr, types: _Types) -> pa.DataType | None:
    name = _column_name(node)
    kind = None if name is None else types.get(name)
    return kind.value_type if kind is not None and pa.types.is_dictionary(kind) else kind


def _column_name(node: ast.expr) -> str | None:
    """Return the column that a name or ``column('a name')`` stands for, else None."""
    if isinstance(node, ast.Name):
        return node.id
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "column"
        and not node.keywords
        and len(node.args) == 1
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
    ):
        return node.args[0].value
    return None


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise ValueError(f"{ast.unparse(node)!r} is neither a column nor a value") from error
