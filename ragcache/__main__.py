"""`python -m ragcache` is the `ragcache` command."""

from ragcache.cli import main

if __name__ == "__main__":
    main()
