"""Fusion methods by name: those of ragcache and those of plug-ins."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, NamedTuple

from ragcache import plugins
from ragcache.errors import ConfigError, blaming
from ragcache.fusion.cacheblend import CacheBlend
from ragcache.fusion.epic import Epic
from ragcache.fusion.full import Full
from ragcache.fusion.link import Link
from ragcache.fusion.method import FusionMethod
from ragcache.fusion.raw import Concat
from ragcache.fusion.reposition import Reposition
from ragcache.plugins import Registry, load

METHODS: Registry[type[FusionMethod]] = Registry(
    plugins.METHODS,
    {"full": Full, "reposition": Reposition, "concat": Concat, "link": Link, "cacheblend": CacheBlend, "epic": Epic},
)


class MethodInfo(NamedTuple):
    """A row of the table of methods: a method's name, its class attributes, and the names of its options."""

    name: str
    summary: str
    paper: str
    needs_training: bool
    recipes: tuple[str, ...]
    options: tuple[str, ...]


def methods() -> list[MethodInfo]:
    """Return every fusion method, with its paper and whether it needs training."""
    return [
        MethodInfo(m.name, m.summary, m.paper, m.needs_training, m.recipes, tuple(f.name for f in fields(m)))
        for m in METHODS.values()
    ]


def get_method(method: str | FusionMethod, /, **options: Any) -> FusionMethod:
    """Return a method by name, with its options; a method object is returned unchanged.

    Raises ConfigError that lists the known methods or the method's options, or that names the option out of range;
    ConfigError for options beside a method object; PluginError if a plug-in's method cannot be loaded.
    """
    if isinstance(method, FusionMethod):
        if options:
            raise ConfigError(f"options {', '.join(options)} go with a method's name, not with a method object")
        return method
    kind = load("method", method, METHODS)
    known = [f.name for f in fields(kind)]
    if unknown := [name for name in options if name not in known]:
        takes = f"takes {', '.join(known)}" if known else "takes no options"
        raise ConfigError(f"method {method!r} has no option {', '.join(unknown)}; it {takes}", "method_options")
    with blaming("method_options"):
        return kind(**options)


def method_label(method: FusionMethod) -> str:
    """Return the method's name with the options that differ from their defaults: "cacheblend(ratio=0.3)"."""
    stated = []
    for field in fields(method):
        value = getattr(method, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if value != default:
            stated.append(f"{field.name}={value!r}")
    return f"{method.name}({', '.join(stated)})" if stated else method.name


def labelled_name(label: str) -> str:
    """Return the name of the method in a `method_label`."""
    return label.partition("(")[0]
