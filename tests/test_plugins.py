"""Plug-ins and objects of annexes: found by name, loaded at first use, named with their distribution if that fails."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from blocks import make_block, make_key

from ragcache import codecs, plugins
from ragcache.codecs import RawCodec
from ragcache.codecs.block_file import read_block, write_block
from ragcache.codecs.container import read_container, write_container
from ragcache.engine.attach import ADAPTERS
from ragcache.errors import ConfigError, PluginError, SchemaVersionError
from ragcache.ingest.worker import WORKERS
from ragcache.plugins import Registry, load
from ragcache.retrieval.open_index import INDEXES
from ragcache.seal import UNSEALED
from ragcache.store.eviction import ADMISSIONS, POLICIES
from ragcache.store.remote import SCHEMES

GROUP = "ragcache.made_up"


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """Puts a distribution with these entry points and modules on the path."""

    def make(name: str, entries: dict[str, str], group: str = GROUP, **modules: str) -> Path:
        info = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\n")
        lines = "".join(f"{key} = {value}\n" for key, value in entries.items())
        (info / "entry_points.txt").write_text(f"[{group}]\n{lines}")
        for module, text in modules.items():
            (tmp_path / f"{module}.py").write_text(text)
        return tmp_path

    monkeypatch.syspath_prepend(tmp_path)
    yield make
    for name in ("plug_good", "plug_bad"):
        sys.modules.pop(name, None)


def test_a_plug_in_is_imported_at_its_first_use(distribution):
    distribution("good-plugs", {"two": "plug_good:TWO", "one": "plug_good:ONE"}, plug_good="ONE, TWO = 1, 2\n")
    found = Registry(GROUP, {"own": 0})
    assert "plug_good" not in sys.modules
    assert found["own"] == 0
    assert "plug_good" not in sys.modules
    assert found["one"] == 1
    assert dict(found) == {"own": 0, "one": 1, "two": 2}
    assert next(iter(found)) == "own"


def test_a_name_of_ones_own_stays(distribution):
    distribution("good-plugs", {"own": "plug_good:ONE"}, plug_good="ONE = 1\n")
    found = Registry(GROUP, {"own": 0, "other": 2})
    assert (found["own"], list(found.items()), len(found)) == (0, [("own", 0), ("other", 2)], 2)


def test_a_broken_plug_in_is_named_and_the_rest_works(distribution, caplog):
    distribution("good-plugs", {"one": "plug_good:ONE"}, plug_good="ONE = 1\n")
    distribution("broken-plugs", {"bad": "plug_bad:X"}, plug_bad="raise ZeroDivisionError('by design')\n")
    found = Registry[int](GROUP)
    with pytest.raises(PluginError, match=r"broken-plugs: its plug-in 'bad' .*by design.*uninstall"):
        found["bad"]
    assert dict(found) == {"one": 1}
    assert dict(found) == {"one": 1}
    assert [record.message.split(":")[0] for record in caplog.records] == ["broken-plugs"]


def test_threads_of_a_fresh_registry_find_every_plug_in(distribution):
    distribution("good-plugs", {"one": "plug_good:ONE", "two": "plug_good:TWO"}, plug_good="ONE, TWO = 1, 2\n")
    distribution("broken-plugs", {"bad": "plug_bad:X"}, plug_bad="raise ZeroDivisionError('by design')\n")
    for _ in range(20):
        found, start = Registry[int](GROUP, {"own": 0}), Barrier(4)

        def use(name, found=found, start=start):
            start.wait()
            return found[name], list(found)

        with ThreadPoolExecutor(4) as pool:
            assert (
                list(pool.map(use, ["one", "two"] * 2)) == [(1, ["own", "one", "two"]), (2, ["own", "one", "two"])] * 2
            )


@pytest.mark.parametrize("entries", [{}, {"int16": "no_such_module:Codec"}])
def test_a_codec_that_is_missing_is_to_be_installed_and_nothing_deleted(distribution, monkeypatch, tmp_path, entries):
    distribution("codec-plugs", entries, plugins.CODECS)
    monkeypatch.setattr(codecs, "CODECS", Registry(plugins.CODECS))
    write_block(tmp_path / "block", make_key(1), make_block(1), RawCodec())
    seal = UNSEALED.of(make_key(1))
    tensors, metadata = read_container(tmp_path / "block", seal=seal)
    write_container(tmp_path / "block", tensors, {**metadata, "codec": "int16"}, seal=seal)
    for _ in range(2):
        with pytest.raises(SchemaVersionError, match=r"codec 'int16' is needed.*install the package") as refused:
            read_block(tmp_path / "block", make_key(1))
        assert "delete" not in str(refused.value)
        assert ("codec-plugs" in str(refused.value)) == bool(entries)
        list(codecs.CODECS)


def test_load_imports_an_object_at_its_first_use(distribution):
    distribution("good-plugs", {"one": "plug_good:ONE"}, plug_good="ONE, TWO = 1, 2\n")
    objects = {"own": 0, "two": "plug_good:TWO"}
    assert load("thing", "own", objects) == 0
    assert "plug_good" not in sys.modules
    assert [load("thing", "two", objects), load("thing", "one", Registry[int](GROUP))] == [2, 1]


def test_load_refuses_a_name_that_there_is_not():
    with pytest.raises(ConfigError, match=r"^thing 'nobody' is unknown; choose one of own, two$"):
        load("thing", "nobody", {"own": 0, "two": "plug_good:TWO"})


def test_load_refuses_an_object_that_cannot_be_imported(distribution):
    distribution("broken-plugs", {}, plug_bad="raise ZeroDivisionError('by design')\n")
    with pytest.raises(PluginError, match=r"ragcache-kv: its plug-in 'bad' \(plug_bad:X\) .*by design"):
        load("thing", "bad", {"bad": "plug_bad:X"})


TABLES = [ADAPTERS, ADMISSIONS, INDEXES, POLICIES, SCHEMES, WORKERS]


def test_every_object_of_an_annex_is_where_its_table_says():
    places = [(name, table) for table in TABLES for name, found in table.items() if isinstance(found, str)]
    assert len(places) > 11
    for name, table in places:
        assert not isinstance(load("object", name, table), str), name


def test_a_name_that_nobody_has_is_a_key_error():
    with pytest.raises(KeyError):
        Registry[int](GROUP)["nobody"]


def test_the_command_line_goes_on_without_a_broken_command(distribution):
    where = distribution("broken-plugs", {"frobnicate": "no_such_module:run"}, "ragcache.commands")
    script = f"import sys; sys.path.insert(0, {str(where)!r}); from ragcache.cli.commands import main; main()"
    ran = subprocess.run([sys.executable, "-c", script, "methods"], capture_output=True, text=True, check=True)
    assert "reposition" in ran.stdout
    assert "broken-plugs: its plug-in 'frobnicate'" in ran.stderr
