"""Names, circles and renamed words of `ragcache/`, and what still has to go: the data is in `tools/house.py`."""

from tools import house
from tools.house import ANNEXES, CIRCLES, HOUSE, ING, ROOMS, ROOT, TWICE

PACKAGE = ROOT / HOUSE
SIZES = house.measure()


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
