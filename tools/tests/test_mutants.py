"""The mutants of the kill matrix: programs that differ in one place, the same ones for a seed."""

import ast
import json

import pytest

from tools.mutants import ROOT, drawn, mutants

KINDS = ["comparison", "condition", "constant", "dropped call", "off by one", "sign", "swapped argument"]


@pytest.mark.parametrize("name", ["ragcache/kv/prefix_cache.py", "ragcache/codecs/affine.py"])
def test_a_mutant_is_a_program_that_differs_in_its_line(name):
    whole = (ROOT / name).read_bytes()
    found = list(mutants(ROOT / name))
    assert len(found) > 100
    for mutant in found[::40]:
        text = whole[: mutant.start] + mutant.after.encode() + whole[mutant.end :]
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(whole)), mutant
        assert whole[: mutant.start].count(b"\n") + 1 == mutant.line


def test_a_seed_draws_the_same_ones_of_every_kind():
    room = ROOT / "ragcache" / "kv"
    assert drawn(room, 1, 14) == drawn(room, 1, 14) != drawn(room, 2, 14)
    assert sorted({mutant.kind for mutant in drawn(room, 1, 14)}) == KINDS


def test_what_kills_a_mutant_is_there():
    """The matrix names, for each mutant that is killed, a test that there is; one that moves takes its row along."""
    matrix = json.loads((ROOT / "tests" / "mutants.json").read_text(encoding="utf-8"))
    rows = [*matrix["mutants"], *matrix["beside"]["mutants"], *matrix["by_hand"]]
    for row in rows:
        file, _, test = (row.get("killed_after_by") or row.get("killed_by") or "").partition("::")
        if test:
            assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8"), row
