"""Metadata filters, compiled to SQL.

    {"year": 2024}                                       equality; several fields: all of them
    {"year": {"$gte": 2020, "$lt": 2024}}                $eq $ne $gt $gte $lt $lte $in $nin $exists
    {"tags": {"$contains": "river"}}                     a member of a list
    {"source": {"$glob": "/srv/docs/*.md"}}              * any text, ? one character, [*] the character itself
    {"$and": [...]}, {"$or": [...]}, {"$not": {...}}     of filters

A field is a key of the metadata object, taken as it is written (no paths). Types are kept apart: "1", 1 and true
differ, 1 and 1.0 do not. An absent field equals nothing, is neither greater nor less than anything, and is in no list.
None equals null. Strings are ordered by code point. $ne, $nin and $not are the exact opposites of $eq, $in
and the filter itself: they hold where the field is absent. Both databases give the same answers.

`source`, `title`, `document_id` and `chunk_id` also name the document's own source, title and id and the passage's own
id. A condition on such a field holds if it holds for the metadata field of that name or for the own value. An empty
title is absent.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Column, Text, and_, case, cast, exists, false, func, literal, not_, or_, select, true
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.sql.elements import ColumnElement

from ragcache.errors import FilterError
from ragcache.store.json_values import text_problem

MAX_CONDITIONS = 1000
MAX_DEPTH = 32
MAX_GLOB = 1000  # characters

Filter = Mapping[str, Any]
Condition = ColumnElement[bool]
Scalar = str | int | float | bool | None
Compare = Callable[[Any, Any], Any]
# Text columns that a filter names like metadata fields: each function applies a condition to its columns.
Own = Mapping[str, Callable[[Callable[[ColumnElement[Any]], Condition]], Condition]]
OWN_FIELDS = ("source", "title", "document_id", "chunk_id")

_ORDER: dict[str, Compare] = {"$gt": operator.gt, "$gte": operator.ge, "$lt": operator.lt, "$lte": operator.le}
_OPERATORS = ("$eq", "$ne", *_ORDER, "$in", "$nin", "$exists", "$contains", "$glob")
_GLOB_PARTS = re.compile(r"\*|\?|\[[*?\[]\]|[^*?]", re.DOTALL)


# How each database expresses a condition on a field of a JSON column (`matches`: on a text column that is not null). No
# term is ever NULL.


@dataclass(frozen=True)
class _SQLiteTerms:
    """SQLite's terms, over json_each, whose keys need no quoting: a JSON path cannot name a key with a quote in it."""

    column: ColumnElement[Any]

    def present(self, field: str) -> Condition:
        return self._entry(field, lambda entry: true())

    def among(self, field: str, values: Sequence[Scalar]) -> Condition:
        return self._entry(field, lambda entry: self._is_one_of(entry, values))

    def ordered(self, field: str, compare: Compare, value: str | float) -> Condition:
        types = ("text",) if isinstance(value, str) else ("integer", "real")
        return self._entry(field, lambda entry: and_(entry.c.type.in_(types), compare(entry.c.atom, value)))

    def contains(self, field: str, value: Scalar) -> Condition:
        def holds(entry: Any) -> Condition:
            # Values of other types may not be JSON.
            members = case((entry.c.type == "array", entry.c.value), else_="[]")
            member = func.json_each(members).table_valued("type", "atom")
            return exists().select_from(member).where(self._is_one_of(member, [value]))

        return self._entry(field, holds)

    def glob(self, field: str, pattern: str) -> Condition:
        return self._entry(field, lambda entry: and_(entry.c.type == "text", self.matches(entry.c.atom, pattern)))

    def matches(self, text: ColumnElement[Any], pattern: str) -> Condition:
        """Match by GLOB, which reads a lone bracket as the beginning of a set."""
        parts = ("[[]" if part == "[" else part for part in _GLOB_PARTS.findall(pattern))
        return text.op("GLOB", is_comparison=True)("".join(parts))

    def _entry(self, field: str, condition: Callable[[Any], Condition]) -> Condition:
        entry = func.json_each(self.column).table_valued("key", "type", "atom", "value")
        return exists().select_from(entry).where(entry.c.key == field, condition(entry))

    def _is_one_of(self, entry: Any, values: Sequence[Scalar]) -> Condition:
        constants = {json.dumps(value) for value in values if value is None or isinstance(value, bool)}
        numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
        strings = [value for value in values if isinstance(value, str)]
        return or_(
            entry.c.type.in_(sorted(constants)),
            and_(entry.c.type.in_(("integer", "real")), entry.c.atom.in_(numbers)),
            and_(entry.c.type == "text", entry.c.atom.in_(strings)),
        )


@dataclass(frozen=True)
class _PostgresTerms:
    """PostgreSQL's terms, over jsonb: equality distinguishes types, but order mixes them, so `ordered` checks the
    type."""

    column: ColumnElement[Any]

    def present(self, field: str) -> Condition:
        return self._value(field).is_not(None)

    def among(self, field: str, values: Sequence[Scalar]) -> Condition:
        operands = [cast(literal(json.dumps(value), Text), JSONB) for value in values]
        return func.coalesce(self._value(field).in_(operands), false())

    def ordered(self, field: str, compare: Compare, value: str | float) -> Condition:
        if isinstance(value, str):
            return func.coalesce(and_(self._type(field) == "string", compare(self._text(field), value)), false())
        number = cast(literal(json.dumps(value), Text), JSONB)
        return func.coalesce(and_(self._type(field) == "number", compare(self._value(field), number)), false())

    def contains(self, field: str, value: Scalar) -> Condition:
        members = cast(literal(json.dumps([value]), Text), JSONB)
        return func.coalesce(and_(self._type(field) == "array", self._value(field).op("@>")(members)), false())

    def glob(self, field: str, pattern: str) -> Condition:
        matches = self.matches(self._text(field), pattern)
        return func.coalesce(and_(self._type(field) == "string", matches), false())

    def matches(self, text: ColumnElement[Any], pattern: str) -> Condition:
        """Match by LIKE."""
        wild = {"*": "%", "?": "_", "%": r"\%", "_": r"\_", "\\": r"\\"}
        parts = (part[1] if len(part) > 1 else wild.get(part, part) for part in _GLOB_PARTS.findall(pattern))
        return text.like("".join(parts), escape="\\")

    def _text(self, field: str) -> ColumnElement[Any]:
        return self.column.op("->>", return_type=Text())(literal(field, Text)).collate("C")

    def _value(self, field: str) -> ColumnElement[Any]:
        return self.column.op("->", return_type=JSONB())(literal(field, Text))

    def _type(self, field: str) -> ColumnElement[Any]:
        return func.jsonb_typeof(self._value(field))


_Terms = _SQLiteTerms | _PostgresTerms
_TERMS: dict[str, type[_Terms]] = {"sqlite": _SQLiteTerms, "postgresql": _PostgresTerms}


def compile_filter(where: Filter, column: ColumnElement[Any], dialect: str, own: Own) -> Condition:
    """Return the SQL condition that holds when the JSON object in `column`, together with the `own` columns
    (OWN_FIELDS), passes the filter; never NULL. Raises FilterError."""
    return _Compiler(_TERMS[dialect](column), own).filter(where, 0)


def field_names(column: Column[Any], dialect: str) -> Any:
    """Return a query for the distinct keys of the JSON objects in `column`."""
    if dialect == "sqlite":
        entry = func.json_each(column).table_valued("key")
        return select(entry.c.key).select_from(column.table).join(entry, true()).distinct()
    return select(func.jsonb_object_keys(column)).distinct()


def fields_of(where: Filter) -> set[str]:
    """Return the metadata fields that a valid filter names. Alternatives ($or) to a field that begins with _ are left
    out: such fields belong to a framework, which names them whether or not any passage has them."""
    found: set[str] = set()
    for name, value in where.items():
        if name in ("$and", "$or"):
            parts = [fields_of(part) for part in value]
            if name == "$and" or not any(all(field.startswith("_") for field in part) for part in parts):
                found.update(*parts)
        elif name == "$not":
            found |= fields_of(value)
        else:
            found.add(name)
    return found


@dataclass
class _Compiler:
    _terms: _Terms
    _own: Own
    _conditions: int = 0

    def filter(self, where: object, depth: int) -> Condition:
        if not isinstance(where, Mapping):
            raise FilterError(f"filter {where!r}: an object like {{'field': value}} is expected here")
        if depth > MAX_DEPTH:
            raise FilterError(f"a filter nested deeper than {MAX_DEPTH}; simplify it")
        return and_(true(), *(self._entry(name, value, depth) for name, value in where.items()))

    def _entry(self, name: object, value: object, depth: int) -> Condition:
        if not isinstance(name, str) or text_problem(name):
            raise FilterError(f"filter field {name!r}: a name is expected")
        if name in ("$and", "$or"):
            if not isinstance(value, list | tuple) or not value:
                raise FilterError(f"{name}: a list of filters is expected, not {value!r}")
            parts = [self.filter(part, depth + 1) for part in value]
            return and_(*parts) if name == "$and" else or_(*parts)
        if name == "$not":
            return not_(self.filter(value, depth + 1))
        if name.startswith("$"):
            raise FilterError(f"{name!r} is unknown; $and, $or and $not join filters, operators follow a field")
        return self._field(name, value)

    def _field(self, field: str, value: object) -> Condition:
        if not isinstance(value, Mapping):
            return self._operator(field, "$eq", value)
        if not value:
            raise FilterError(f"{field!r}: no operator given; choose from {', '.join(_OPERATORS)}")
        return and_(*(self._operator(field, name, operand) for name, operand in value.items()))

    def _operator(self, field: str, name: object, operand: object) -> Condition:
        self._conditions += 1
        if self._conditions > MAX_CONDITIONS:
            raise FilterError(f"a filter of more than {MAX_CONDITIONS} conditions; use $in for lists of values")
        if name in ("$eq", "$ne"):
            condition = self._among(field, [_scalar(field, operand)])
            return condition if name == "$eq" else not_(condition)
        if name in ("$in", "$nin"):
            condition = self._among(field, _scalars(field, name, operand))
            return condition if name == "$in" else not_(condition)
        if name == "$exists":
            return self._exists(field, operand)
        if name == "$contains":
            return self._terms.contains(field, _scalar(field, operand))
        if name == "$glob":
            return self._glob(field, operand)
        if isinstance(name, str) and name in _ORDER:
            compare, value = _ORDER[name], _scalar(field, operand)
            if value is None or isinstance(value, bool):
                raise FilterError(f"{field!r}: {name} compares numbers or strings, not {value!r}")
            condition = self._terms.ordered(field, compare, value)
            is_text = isinstance(value, str)  # the own columns are text too
            return self._or_own(field, condition, lambda own: compare(own, value)) if is_text else condition
        raise FilterError(f"{field!r}: operator {name!r} is unknown; choose from {', '.join(_OPERATORS)}")

    def _exists(self, field: str, operand: object) -> Condition:
        if not isinstance(operand, bool):
            raise FilterError(f"{field!r}: $exists takes true or false, not {operand!r}")
        present = self._or_own(field, self._terms.present(field), lambda own: own != "")
        return present if operand else not_(present)

    def _or_own(self, field: str, condition: Condition, own: Callable[[ColumnElement[Any]], Any]) -> Condition:
        """Return the condition extended to the document's or passage's own column of the same name, if there is such a
        column."""
        return or_(condition, self._own[field](own)) if field in self._own else condition

    def _among(self, field: str, values: Sequence[Scalar]) -> Condition:
        texts = [value for value in values if isinstance(value, str)]
        return self._or_own(field, self._terms.among(field, values), lambda column: column.in_(texts))

    def _glob(self, field: str, pattern: object) -> Condition:
        if not isinstance(pattern, str) or text_problem(pattern) or len(pattern) > MAX_GLOB:
            raise FilterError(
                f"{field!r}: $glob takes a pattern of at most {MAX_GLOB} characters, not {pattern!r:.200}"
            )
        return self._or_own(field, self._terms.glob(field, pattern), lambda own: self._terms.matches(own, pattern))


def _scalar(field: str, value: object) -> Scalar:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, str) and not text_problem(value):
        return value
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise FilterError(f"{field!r}: {value!r} is no string, 64-bit or finite number, true, false or null")


def _scalars(field: str, name: object, value: object) -> list[Scalar]:
    if not isinstance(value, list | tuple | set | frozenset) or len(value) > 10 * MAX_CONDITIONS:
        raise FilterError(f"{field!r}: {name} takes a list of at most {10 * MAX_CONDITIONS} values, not {value!r:.200}")
    return [_scalar(field, item) for item in value]
