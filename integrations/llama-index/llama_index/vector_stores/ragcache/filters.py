"""LlamaIndex's metadata filters, said in ragcache's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llama_index.core.vector_stores.types import FilterCondition, FilterOperator, MetadataFilter, MetadataFilters

from ragcache.errors import FilterError

Filter = Mapping[str, Any]

_OPERATORS = {
    FilterOperator.EQ: "$eq",
    FilterOperator.NE: "$ne",
    FilterOperator.GT: "$gt",
    FilterOperator.GTE: "$gte",
    FilterOperator.LT: "$lt",
    FilterOperator.LTE: "$lte",
    FilterOperator.IN: "$in",
    FilterOperator.NIN: "$nin",
}


def to_filter(filters: MetadataFilters | Filter | None) -> Filter | None:
    """The ragcache filter of the same meaning; None where everything passes. A ragcache filter is left as it is.

    Raises FilterError naming the operator for those that only look into lists or texts.
    """
    if filters is None or isinstance(filters, Mapping):
        return filters or None
    return _joined(filters) or None


def all_of(*filters: Filter | None) -> Filter | None:
    """The filter that passes what all of these pass."""
    wanted = [one for one in filters if one]
    if len(wanted) < 2:
        return wanted[0] if wanted else None
    return {"$and": wanted}


def _joined(filters: MetadataFilters) -> Filter:
    parts = [_joined(one) if isinstance(one, MetadataFilters) else _condition(one) for one in filters.filters]
    if not parts:
        return {}  # as LlamaIndex's own store reads it: no filter at all
    if filters.condition == FilterCondition.NOT:
        return {"$not": {"$or": parts}}  # passes what none of the filters passes
    if len(parts) == 1:
        return parts[0]
    return {"$or" if filters.condition == FilterCondition.OR else "$and": parts}


def _condition(one: MetadataFilter) -> Filter:
    if one.operator not in _OPERATORS:
        known = ", ".join(repr(operator.value) for operator in _OPERATORS)
        raise FilterError(
            f"filter on {one.key!r}: operator {one.operator.value!r} is not supported, since stored metadata is "
            f"compared by whole values; use one of {known}"
        )
    return {one.key: {_OPERATORS[one.operator]: one.value}}
