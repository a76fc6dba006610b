"""YAML front matter, as JSON types.

Scalars are those of YAML 1.2: `no` and `on` are words, and 12:30 is not a number. Dates stay strings, as written. Front
matter that is not YAML is read line by line as "name: value", since authors write `title: C#: a guide`.
"""

from __future__ import annotations

import math
import re
from base64 import b64encode
from datetime import date
from decimal import Decimal
from typing import Any

import yaml

MAX_DEPTH = 32
MAX_CHARACTERS = 16 << 10  # a longer block is taken for text
_FIELD = re.compile(r"(?P<name>[A-Za-z_][\w-]*):[ \t]+(?P<value>\S.*)")
_SCALARS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?(?:0|[1-9][0-9]*)", list("-+0123456789")),
    "float": (r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", list("-+.0123456789")),
}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012

    def fetch_alias(self) -> None:
        raise yaml.YAMLError("aliases are not read: a few lines of them stand for gigabytes")

    def fetch_flow_collection_start(self, kind: Any) -> None:
        if self.flow_level >= MAX_DEPTH:  # each level makes every further token slower
            raise yaml.YAMLError(f"nested deeper than {MAX_DEPTH}")
        super().fetch_flow_collection_start(kind)


def _number(loader: _Loader, node: yaml.ScalarNode) -> float | str:
    """Return the number, or its text if a number would lose digits: version 1.10 is not version 1.1."""
    text = str(node.value)
    number = float(text)
    if math.isinf(number):
        return str(number)
    return number if Decimal(text) == Decimal(repr(number)) and not re.search(r"\.\d*0$", text) else text


_Loader.add_constructor("tag:yaml.org,2002:float", _number)
for _name, (_pattern, _first) in _SCALARS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(rf"(?:{_pattern})\Z"), _first)


def parse_front_matter(lines: str) -> dict[str, Any]:
    """Return the fields of the front matter; an empty dict if the lines contain no fields."""
    if len(lines) > MAX_CHARACTERS:
        return {}
    try:
        found = _parse(lines)
    except ValueError:
        fields = (_FIELD.fullmatch(line.rstrip()) for line in lines.splitlines())
        return {field["name"]: _scalar(field["value"]) for field in fields if field}
    return found if isinstance(found, dict) else {}


def _parse(text: str) -> Any:
    """Parse YAML into JSON types. Raises ValueError."""
    try:
        return _json(yaml.load(text, _Loader))
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _scalar(value: str) -> Any:
    try:
        found = _parse(value)
    except ValueError:
        found = {}
    return value.strip("\"'") if isinstance(found, dict) else found


def _json(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, set):  # a set's order differs between processes
        return sorted(map(str, value))
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return value.isoformat() if isinstance(value, date) else str(value)
