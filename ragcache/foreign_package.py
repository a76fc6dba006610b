"""Detection of another project's package that is also called `ragcache`.

The distribution of that name on PyPI is another project; this project is `ragcache-kv`. Both install a package
`ragcache`: if both are installed, their files lie in the same directory and may overwrite each other.
"""

from __future__ import annotations

from functools import cache

from ragcache.errors import ForeignPackageError

NAME = "ragcache"
# This project's own summary. Its distribution was once called `ragcache` too, and an old editable install is no error.
OWN_SUMMARY = "Retrieval-augmented generation that never reads the same passage twice"


@cache
def refuse_foreign() -> None:
    """Raise ForeignPackageError if another project's distribution `ragcache` is installed. A success is remembered."""
    from importlib.metadata import distributions  # slower to import than the rest of `import ragcache`

    for found in distributions(name=NAME):
        about = found.metadata
        if about and about["Name"] and about["Summary"] != OWN_SUMMARY:
            raise ForeignPackageError(
                f"another project's package, {NAME} {about['Version']} ({about['Summary']}), is installed beside this "
                f"one in {found.locate_file('')}, and both use the import name {NAME}; run: "
                "pip uninstall -y ragcache ragcache-kv, then install ragcache-kv again"
            )
