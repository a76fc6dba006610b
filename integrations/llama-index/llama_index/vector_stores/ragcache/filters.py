"""Translation of LlamaIndex's filters to ragcache's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llama_index.core.vector_stores.types import FilterCondition, FilterOperator, MetadataFilter, MetadataFilters

from llama_index.vector_stores.ragcache.nodes import ID_FIELD, REF_FIELD
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
    FilterOperator.CONTAINS: "$contains",
}
_OPPOSITES = {"$ne": "$eq", "$nin": "$in"}
# LlamaIndex's names for a node's document and for a node, in metadata given to vector stores and on nodes.
_DOCUMENT_KEYS = ("document_id", "doc_id", "ref_doc_id")
_NODE_KEYS = ("node_id", "id_", "id")
_OF_MEMBERS = {FilterOperator.ANY: "$or", FilterOperator.ALL: "$and"}


def to_filter(filters: MetadataFilters | Filter | None) -> Filter | None:
    """Return the equivalent ragcache filter, or None if everything passes. In a ragcache filter only LlamaIndex's names
    of documents and nodes are translated.

    Raises FilterError naming an operator that searches in texts.
    """
    try:
        return _in_own_names(_joined(filters) if isinstance(filters, MetadataFilters) else filters) or None
    except RecursionError as error:
        raise FilterError("a filter is nested too deeply; simplify it") from error


def all_of(*filters: Filter | None) -> Filter | None:
    """Return a filter that passes documents that all of these pass."""
    wanted = [one for one in filters if one]
    if len(wanted) < 2:
        return wanted[0] if wanted else None
    return {"$and": wanted}


def _joined(filters: MetadataFilters) -> Filter:
    parts = [_joined(one) if isinstance(one, MetadataFilters) else _condition(one) for one in filters.filters]
    if not parts:
        return {}  # as LlamaIndex's own store reads it: no filter at all
    if filters.condition == FilterCondition.NOT:
        return {"$not": {"$or": parts}}  # passes if none of the filters passes
    if len(parts) == 1:
        return parts[0]
    return {"$or" if filters.condition == FilterCondition.OR else "$and": parts}


def _condition(one: MetadataFilter) -> Filter:
    if one.operator in _OF_MEMBERS:
        return _of_members(one)
    if one.operator not in _OPERATORS:
        known = ", ".join(repr(operator.value) for operator in [*_OPERATORS, *_OF_MEMBERS])
        raise FilterError(
            f"filter on {one.key!r}: operator {one.operator.value!r} is not supported, since stored texts are "
            f"compared whole; use one of {known}"
        )
    return {one.key: {_OPERATORS[one.operator]: one.value}}


def _in_own_names(where: Any) -> Any:
    """Return the filter with LlamaIndex's names translated. An invalid filter is left for the store to refuse."""
    if not isinstance(where, Mapping):
        return where
    found: list[Filter] = []
    for name, value in where.items():
        if name in ("$and", "$or") and isinstance(value, list | tuple):
            found.append({name: [_in_own_names(part) for part in value]})
        elif name == "$not":
            found.append({name: _in_own_names(value)})
        elif name in (*_DOCUMENT_KEYS, *_NODE_KEYS) and value != {}:
            given = value if isinstance(value, Mapping) else {"$eq": value}
            found += [{"$not": _of_ids(name, {_OPPOSITES[sign]: given[sign]})} for sign in given if sign in _OPPOSITES]
            if "$exists" in given:  # every passage has an id
                found.append({"chunk_id": {"$exists": given["$exists"]}})
            if rest := {sign: given[sign] for sign in given if sign not in (*_OPPOSITES, "$exists")}:
                found.append(_of_ids(name, rest))
        else:
            found.append({name: value})
    return all_of(*found) or {}


def _of_ids(key: str, condition: Filter) -> Filter:
    """Return a filter on the ids that `key` names in LlamaIndex, or on a metadata field of this name.

    A node is stored as a document, so the store's `document_id` is the node's id; for a passage that was ingested
    without LlamaIndex it is the id of its document.
    """
    own = {"$and": [{"document_id": condition}, {"$not": {ID_FIELD: condition}}]}
    if key in _NODE_KEYS:
        return {"$or": [{"chunk_id": condition}, {ID_FIELD: condition}, {key: condition}]}
    return {"$or": [own, {REF_FIELD: condition}, *([] if key == "document_id" else [{key: condition}])]}


def _of_members(one: MetadataFilter) -> Filter:
    if not isinstance(one.value, list):
        raise FilterError(f"filter on {one.key!r}: {one.operator.value!r} takes a list of values, not {one.value!r}")
    parts = [{one.key: {"$contains": value}} for value in one.value]
    if parts:
        return {_OF_MEMBERS[one.operator]: parts}
    return {one.key: {"$in": []} if one.operator == FilterOperator.ANY else {"$exists": True}}
