"""Row filters: ``lang == 'en' and year >= 2020`` becomes a pyarrow expression.

The text is parsed as a Python expression and only comparisons, ``in``, ``is None``, ``and``,
``or`` and ``not`` over columns and literals are translated: nothing is ever evaluated. As in SQL, a
null satisfies no comparison, neither ``==`` nor ``!=``, neither ``in`` nor ``not in``.
"""

from __future__ import annotations

import ast
import functools
import operator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from whiten_index.errors import ConfigError, CorpusError

_COMPARE = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


@dataclass(frozen=True)
class RowFilter:
    """A condition on columns.

    Attributes:
        text: as the user wrote it.
        columns: the columns it reads.
        expression: the pyarrow expression.
    """

    text: str
    columns: tuple[str, ...]
    expression: Any

    @classmethod
    def parse(cls, text: str) -> RowFilter:
        """Translate ``text``.

        Raises:
            ConfigError: it is not a condition of the kind described above.
        """
        try:
            tree = ast.parse(text.strip(), mode="eval").body
            expression = _condition(tree)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
            raise ConfigError(
                f"the row filter {text!r} is not understood ({error}); write conditions such as "
                "lang == 'en' and (year >= 2020 or source in ['a', 'b']) and title is not None"
            ) from error
        names = sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)})
        return cls(text, tuple(names), expression)

    def apply(self, table: pa.Table) -> pa.Table:
        """Return the rows of ``table`` where the condition holds.

        Raises:
            CorpusError: a column is compared with a value of another type.
        """
        try:
            return table.filter(self.expression)
        except (pa.ArrowException, TypeError) as error:
            raise CorpusError(
                f"the row filter {self.text!r} does not fit the columns "
                f"({str(error).splitlines()[0]}); compare a column with a value of its own type"
            ) from error


def _condition(node: ast.expr) -> Any:
    if isinstance(node, ast.BoolOp):
        combine = operator.and_ if isinstance(node.op, ast.And) else operator.or_
        return functools.reduce(combine, map(_condition, node.values))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return ~_condition(node.operand)
    if isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        links = zip(operands, node.ops, operands[1:], strict=False)
        return functools.reduce(operator.and_, (_link(*link) for link in links))
    if isinstance(node, ast.Name):
        return pc.field(node.id)
    raise ValueError(f"{ast.unparse(node)!r} is no condition")


def _link(left: ast.expr, op: ast.cmpop, right: ast.expr) -> Any:
    if isinstance(op, ast.In | ast.NotIn):
        return _membership(_value(left), ast.literal_eval(right), wanted=isinstance(op, ast.In))
    if isinstance(op, ast.Is | ast.IsNot):
        if not (isinstance(right, ast.Constant) and right.value is None):
            raise ValueError("'is' takes None only")
        missing = _value(left).is_null()
        return ~missing if isinstance(op, ast.IsNot) else missing
    return _COMPARE[type(op)](_value(left), _value(right))


def _membership(value: Any, members: Any, *, wanted: bool) -> Any:
    if not isinstance(members, list | tuple | set):
        raise TypeError("'in' takes a list")
    known = ~value.is_null()
    if not members:
        return ~known & known if wanted else known
    found = value.isin(list(members))
    return found if wanted else known & ~found


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        return pc.field(node.id)
    value = ast.literal_eval(node)
    if value is None:
        raise ValueError("compare with None by 'is None' or 'is not None'")
    return pc.scalar(value)
