"""The `ragcache` command, also as `python -m ragcache`."""

import io
import sys

from ragcache.errors import ForeignPackageError
from ragcache.foreign_package import refuse_foreign


def main() -> None:
    """Run the command line, unless another project's package lies among the files that it would import."""
    try:
        refuse_foreign()
    except ForeignPackageError as error:
        sys.exit(f"error: {error}")
    from ragcache.cli.commands import main as run

    for stream in (sys.stdout, sys.stderr):
        # A pipe's encoding may lack letters of a passage: these are written out, and the answer is not lost for them.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    run()


if __name__ == "__main__":
    main()
