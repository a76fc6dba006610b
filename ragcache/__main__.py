"""The `ragcache` command, also as `python -m ragcache`."""

import gc
import io
import sys

from ragcache.errors import ForeignPackageError
from ragcache.foreign_package import refuse_foreign


def main() -> None:
    """Run the command line, or exit with an error if another project's package `ragcache` is installed too."""
    # Imports make a million objects that stay. With Python's own thresholds, the garbage collector takes a seventh of
    # the time of a short command to look at them again.
    gc.set_threshold(10_000, 20, 20)
    try:
        refuse_foreign()
    except ForeignPackageError as error:
        sys.exit(f"error: {error}")
    from ragcache.cli.commands import main as run

    for stream in (sys.stdout, sys.stderr):
        # A pipe's encoding may lack letters of a passage. They are escaped, so that printing the answer does not fail.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    run()


if __name__ == "__main__":
    main()
