"""What tools/house.py counts and finds, over made-up trees."""

from pathlib import Path

import pytest

from tools import house
from tools.house import ROOMS


@pytest.fixture
def tree(tmp_path):
    """Writes files below tmp_path, and returns the path of its package `ragcache`."""

    def write(**texts: str) -> Path:
        for name, text in {"ragcache/__init__": "", **texts}.items():
            file = tmp_path / (name if name.endswith(".md") else f"{name}.py")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        return tmp_path / "ragcache"

    return write


def test_rooms_count_their_lines_and_files(tree, tmp_path):
    tree(**{"ragcache/errors": "a\nb\n", "ragcache/store/a": "1\n", "ragcache/store/tiers/b": "1\n2\n3\n"})
    (tmp_path / "ragcache" / "store" / "notes.txt").write_text("no Python\n")
    sizes = house.measure(tmp_path)
    assert sizes["ragcache"] == (2, 2)  # the top level alone
    assert sizes["ragcache/store"] == (4, 2)  # with packages inside it
    assert sizes["ragcache/engine"] == sizes["extras/eval/ragcache_eval"] == (0, 0)


def test_twins_and_ing_are_found(tree):
    package = tree(
        **{f"ragcache/{name}": "" for name in ("kv/base", "store/base", "a/__init__", "kv/placing", "ring/long")}
    )
    assert house.twins(package) == {"base": 2}
    assert house.named_ing(package) == {"kv/placing"}


CHECKING = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ragcache.b import B\n"


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("from ragcache import b", "from ragcache import a"),
        ("from ragcache.b import B", "import ragcache.a"),
        (CHECKING, "def f():\n    from ragcache.a import A\n"),
        (CHECKING, "try:\n    with x:\n        from .a import A\nfinally:\n    pass\n"),
        (CHECKING, "from . import a"),
    ],
)
def test_a_circle_of_two_is_found(tree, a, b):
    package = tree(**{"ragcache/a": a, "ragcache/b": b, "ragcache/c": "from ragcache import a, b"})
    assert house.circles(house.graph(package)) == {("ragcache.a", "ragcache.b")}


def test_a_circle_through_others_and_packages_is_found(tree):
    package = tree(
        **{
            "ragcache/kv/__init__": "from .block import Block",
            "ragcache/kv/block": "from ragcache.store import tier",
            "ragcache/store/tier": "from ..kv import Block",
            "ragcache/store/alone": "from ragcache.store import tier\nimport os.path",
        }
    )
    assert house.circles(house.graph(package)) == {("ragcache.kv", "ragcache.kv.block", "ragcache.store.tier")}


def test_no_circle_is_made_up(tree):
    package = tree(**{"ragcache/a": "from ragcache.b import B", "ragcache/b": "import a\nfrom a.b import ragcache"})
    assert not house.circles(house.graph(package))


def test_the_front_stands_for_the_modules_of_its_names(tree):
    front = CHECKING + "    from ragcache.a import A\n"
    package = tree(
        **{
            "ragcache/__init__": front,
            "ragcache/a": "from ragcache import B",
            "ragcache/b": "import ragcache",
            "ragcache/c": "from ragcache import __version__",
        }
    )
    assert house.graph(package) == {
        "ragcache": set(),
        "ragcache.a": {"ragcache.b"},
        "ragcache.b": set(),
        "ragcache.c": set(),
    }
    package = tree(**{"ragcache/__init__": front, "ragcache/b": "from ragcache import A"})
    assert house.circles(house.graph(package)) == {("ragcache.a", "ragcache.b")}


def test_words_of_the_glossary_are_found_in_code_and_in_marked_up_text_alone(tree, tmp_path):
    uses = {
        "ragcache/__init__": "from ragcache.a import Job",  # the alias
        "ragcache/a": "class Job: ...",
        "ragcache/b": "def f(x: a.Job) -> None: ...",
        "ragcache/c": '"""Job is a word; so is `Jobs`."""',
        "ragcache/d": '"""See `rc.Job(ids)`."""',
        "docs/e.md": "Job, and `Joblib`",
        "docs/f.md": "see\n\n    a = Job()\n",
        "docs/g.md": "```python\na = Job()\n```",
        "README.md": "`Job`",
        "tests/h": "Job",
    }
    tree(**uses)
    found = {"ragcache/a.py", "ragcache/b.py", "ragcache/d.py", "docs/f.md", "docs/g.md", "README.md"}
    assert house.old_words(tmp_path, {"Job": "PrefillRequest"}) == {f"{file}: Job -> PrefillRequest" for file in found}


def test_the_table_shows_rooms_that_exist_and_their_sums(tree, tmp_path):
    tree(
        **{
            "ragcache/kv/a": "1\n2\n",
            "ragcache/kv/b": "1\n",
            "extras/eval/ragcache_eval/c": "1\n",
            "tests/d": "1\n" * 1234,
        }
    )
    rows = {line[:32].strip(): line[32:].split() for line in house.table(tmp_path).splitlines()}
    kv = ROOMS["ragcache/kv"]
    columns = [kv.files, kv.target_files, 3, kv.lines, kv.target_lines]
    assert rows["ragcache/kv"] == ["2", *(f"{column:,}" for column in columns)]
    assert rows["all of ragcache/"][0] == "3"
    assert rows["all of ragcache/"][3] == "3"
    assert rows["extras/eval/ragcache_eval"][0] == rows["annexes"][0] == "1"
    assert "extras/plan/ragcache_plan" not in rows
    assert rows["tests"] == ["1", "1,234"]
