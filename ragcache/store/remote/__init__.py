"""Remotes: services that hold blobs by name and that several machines share."""

from __future__ import annotations

import re
from collections.abc import Callable

from ragcache import plugins
from ragcache.errors import ConfigError, check_choice
from ragcache.plugins import Registry
from ragcache.store.remote.blobs import Blob as Blob
from ragcache.store.remote.blobs import Blobs as Blobs
from ragcache.store.remote.blobs import Connection as Connection

SCHEMES: Registry[Callable[[str], Blobs]] = Registry(plugins.REMOTES)
"""What opens a URL, by its scheme."""


def connect(url: str, owner: str, *, read_only: bool = False) -> Connection:
    """The checked connection of a store to its remote. Raises what `open_blobs` and `Connection.check` do."""
    connection = Connection(open_blobs(url), owner, read_only=read_only)
    try:
        connection.check()
    except BaseException:
        connection.close()
        raise
    return connection


def open_blobs(url: str) -> Blobs:
    """The remote at a URL such as s3://bucket/prefix or redis://host:6379/0. Asks it nothing yet.

    Raises ConfigError: an unknown scheme, a URL that says too little, or a package that is not installed. No error
    repeats the URL's credentials.
    """
    scheme, sign, _ = url.partition("://")
    if not sign or not re.fullmatch("[a-z0-9+.-]+", scheme):
        raise ConfigError("the remote is no URL; write it like s3://bucket/prefix or redis://host:6379/0")
    if scheme not in SCHEMES:
        check_choice("the remote's scheme", scheme, SCHEMES)
    return SCHEMES[scheme](url)
