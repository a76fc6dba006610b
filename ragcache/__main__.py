"""The `ragcache` command, also as `python -m ragcache`."""

import sys

from ragcache.errors import ForeignPackageError
from ragcache.runtime import refuse_foreign


def main() -> None:
    """Run the command line, unless another project's package lies among the files that it would import."""
    try:
        refuse_foreign()
    except ForeignPackageError as error:
        sys.exit(f"error: {error}")
    from ragcache.cli.commands import main as run

    run()


if __name__ == "__main__":
    main()
