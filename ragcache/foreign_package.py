"""Another project's package that is called `ragcache` too.

The distribution of that name on PyPI is not this one, which is `ragcache-kv`. Both install a package `ragcache`: where
both are installed, the files of one lie among, or over, those of the other.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from ragcache.errors import ForeignPackageError

if TYPE_CHECKING:
    import torch as torch


NAME = "ragcache"
# This project's own summary from when its distribution had the other's name: an old editable install is none of theirs.
OWN_SUMMARY = "Retrieval-augmented generation that never reads the same passage twice"


@cache
def refuse_foreign() -> None:
    """Look through the installed distributions, once. Raises ForeignPackageError."""
    from importlib.metadata import distributions  # takes longer to import than the rest of the package's front

    for found in distributions(name=NAME):
        about = found.metadata
        if about and about["Name"] and about["Summary"] != OWN_SUMMARY:
            raise ForeignPackageError(
                f"another project's package, {NAME} {about['Version']} ({about['Summary']}), is installed beside this "
                f"one in {found.locate_file('')}, and both use the import name {NAME}; run: "
                "pip uninstall -y ragcache ragcache-kv, then install ragcache-kv again"
            )
