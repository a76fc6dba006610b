"""`ragcache/` stays within its budgets, and what still has to go gets less: the data is in `tools/house.py`."""

import math

import pytest

from tools import house
from tools.house import ANNEXES, CIRCLES, HOUSE, ING, ROOMS, ROOT, TWICE

PACKAGE = ROOT / HOUSE
SLACK = 1.05
"""A budget may be larger than its room by this factor; the commit that makes a room smaller lowers its budget."""
SIZES = house.measure()
THERE = [path for path in ROOMS if path not in ANNEXES or (ROOT / path).is_dir()]


@pytest.mark.parametrize("path", THERE)
def test_a_room_keeps_its_budget(path):
    lines, files = SIZES[path]
    assert lines <= ROOMS[path].lines, f"{path} has {lines} lines: make it smaller, or raise its budget and say why"
    assert files <= ROOMS[path].files, f"{path} has {files} files: merge some, or raise its budget and say why"


@pytest.mark.parametrize("path", THERE)
def test_a_budget_is_lowered_with_its_room(path):
    lines, files = (math.ceil(SLACK * count) for count in SIZES[path])
    assert ROOMS[path].lines <= lines, f"{path} has {SIZES[path][0]} lines: lower its budget in tools/house.py"
    assert ROOMS[path].files <= files, f"{path} has {SIZES[path][1]} files: lower its budget in tools/house.py"


def test_every_file_is_in_one_room():
    everything = list(PACKAGE.rglob("*.py"))
    in_rooms = [SIZES[path] for path in ROOMS if path not in ANNEXES]
    assert sum(files for _, files in in_rooms) == len(everything)
    assert sum(lines for lines, _ in in_rooms) == sum(len(file.read_bytes().splitlines()) for file in everything)


def test_no_two_files_share_a_name():
    assert house.twins(PACKAGE) == TWICE, "give new files names of their own, and take what is gone off TWICE"


def test_no_file_is_called_ing():
    assert house.named_ing(PACKAGE) == ING, "name new files after a noun, and take what is gone off ING"


def test_no_modules_import_each_other():
    assert house.circles(house.graph(PACKAGE)) == CIRCLES, "break new circles, and take what is gone off CIRCLES"


def test_renamed_classes_are_gone():
    assert not house.old_words()
