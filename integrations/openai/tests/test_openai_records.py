"""What OpenAI's API keeps, in either database."""

import io

import pytest

from ragcache.errors import ConfigError, NoSuchDocumentError
from ragcache.store.documents import DocumentStore
from ragcache_openai.records import PIECE, Record, Records


@pytest.fixture
def records(url):
    with DocumentStore.open(url) as documents:
        yield Records(documents.database)


def items(*names, owner="me", **more):
    return [Record(name, "item", owner, {"name": name}, **more) for name in names]


def names(page):
    return [one.id for one in page.records]


def test_nothing_is_made_before_something_is_kept(records):
    assert records.get("item", "me", "a") is None
    assert records.page("item", "me", limit=1, newest_first=True) == ([], False)
    assert records.states("item", "") == {}


def test_pages_go_on_from_what_was_listed(records):
    records.add(items(*"abcde"))
    records.add(items("x", owner="you"))

    def page(**bounds):
        found = records.page("item", "me", limit=2, **bounds)
        return names(found), found.has_more

    assert page(newest_first=False) == (["a", "b"], True)
    assert page(newest_first=False, after="d") == (["e"], False)
    assert page(newest_first=True) == (["e", "d"], True)
    assert page(newest_first=True, after="b") == (["a"], False)
    records.add(items("a"))  # one that is kept again is the newest
    assert page(newest_first=True) == (["a", "e"], True)


def test_pages_go_on_from_what_was_deleted(records, monkeypatch):
    records.add(items(*"abcde"))
    records.add(items("x", owner="you"))
    records.delete("bdx")
    for bounds, right in (({"after": "b"}, "ce"), ({"after": "d"}, "e"), ({"after": ""}, "ace")):
        assert names(records.page("item", "me", limit=9, newest_first=False, **bounds)) == list(right)
    records.add(items("b"))  # one that is there again bounds where it is now
    assert names(records.page("item", "me", limit=9, newest_first=True, after="b")) == list("eca")
    for id in ("x", "nothing", "\0"):  # another's, and what never was
        with pytest.raises(ConfigError, match="no object") as unknown:
            records.page("item", "me", limit=9, newest_first=True, after=id)
        assert unknown.value.option == "after"
    monkeypatch.setattr("ragcache_openai.records.REMEMBERED", 2)
    records.add(items(*"fghi"))
    records.delete("a")
    with pytest.raises(ConfigError):
        records.page("item", "me", limit=9, newest_first=True, after="d")  # forgotten
    assert names(records.page("item", "me", limit=9, newest_first=True, after="a")) == []


def test_nul_is_in_nothing(records):
    """PostgreSQL refuses it."""
    records.add(items("a"))
    assert records.get("item", "me", "\0") is None
    assert names(records.page("item", "me", limit=9, newest_first=True, state="\0")) == []


def test_nothing_is_below_what_is_not_there(records):
    with pytest.raises(NoSuchDocumentError, match="'gone' was deleted"):
        records.add([*items("a"), *items("b", parent="gone")])
    assert records.among(["a", "b"]) == []
    records.add([*items("top"), *items("a", parent="top")])
    assert names(records.page("item", "me", parent="top", limit=9, newest_first=True)) == ["a"]


def test_a_files_bytes_go_with_it(records):
    content = bytes(range(256)) * (PIECE // 200)
    body = {"bytes": len(content)}
    records.add(items("store"))
    [file] = records.add([Record("f", "file", "me", body, parent="store", state="done")], io.BytesIO(content))
    assert b"".join(records.content(file)) == content
    assert records.states("file", "store") == {"done": (1, len(content))}
    records.delete(["store"])  # and what is below it
    assert list(records.content(file)) == []


def test_only_what_is_known_is_settled(records):
    [known] = records.add(items("a", state="waiting"))
    records.change("a", {"name": "b"})
    changed = records.settle(known, {"name": "c"}, "done")
    assert (changed.body, changed.state) == ({"name": "b"}, "waiting")
    assert records.settle(changed, {"name": "c"}, "done") == records.get("item", "me", "a")
    assert records.among(["a"])[0].state == "done"
    records.delete(["a"])
    assert records.settle(changed, {}, "done") is None
    assert not records.change("a", {})


def test_the_newest_of_each_owner_stay(records):
    records.add([*items(*"abc"), *items("x", owner="you")])
    records.keep_newest("item", "me", 2)
    assert names(records.page("item", "me", limit=9, newest_first=False)) == ["b", "c"]
    records.keep_newest("item", "me", 2)
    assert records.get("item", "you", "x") is not None
