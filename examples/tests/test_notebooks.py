"""The notebooks run cell by cell, and their outputs agree with their texts."""

import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from kit.makers import made_by
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "examples" / "notebooks"
KERNEL = "python3"
LINK_TOKENS, K = 5, 8

pytestmark = [
    pytest.mark.timeout(900),  # two models are loaded in a process of its own, on whatever cores are left
    pytest.mark.skipif(
        not (ROOT / "ragcache" / "mini" / "config.json").is_file(), reason="the bundled model is missing"
    ),
]


@pytest.fixture(scope="module", autouse=True)
def own_settings(tmp_path_factory):
    """Run without the kernels, configuration and history of the user who runs the tests."""
    home = tmp_path_factory.mktemp("jupyter")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
            (home / name.lower()).mkdir()
            patch.setenv(name, str(home / name.lower()))
        patch.delenv("JUPYTER_PATH", raising=False)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
        assert AsyncKernelManager(kernel_name=KERNEL).format_kernel_cmd()[0] == sys.executable
        yield


class Ran:
    """A notebook that was executed."""

    def __init__(self, name: str, folder: Path) -> None:
        self.book = nbformat.read(NOTEBOOKS / name, as_version=4)
        client = NotebookClient(
            self.book, kernel_name=KERNEL, timeout=800, resources={"metadata": {"path": str(folder)}}
        )
        client.execute()  # raises CellExecutionError at the first cell that fails
        self.outputs = {cell.id: cell.outputs for cell in self.book.cells if cell.cell_type == "code"}

    def printed(self, cell: str) -> str:
        return "".join(out.text for out in self.outputs[cell] if out.output_type == "stream" and out.name == "stdout")

    def has_picture(self, cell: str) -> bool:
        return any("image/png" in out.get("data", {}) for out in self.outputs[cell])

    def check_whole(self) -> None:
        cells = [cell for cell in self.book.cells if cell.cell_type == "code"]
        assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
        assert not [out for outputs in self.outputs.values() for out in outputs if out.output_type == "error"]


fused_prefill = made_by(Ran, "01_fused_prefill.ipynb", NOTEBOOKS)  # where Jupyter runs it


choosing = made_by(Ran, "02_choosing_a_method.ipynb", ROOT)


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_it_is_stored_clean(path):
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    assert (book.nbformat, book.nbformat_minor >= 5) == (4, True)
    assert len({cell.id for cell in book.cells}) == len(book.cells)
    for cell in book.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
    assert book.cells[0].cell_type == "markdown"


@pytest.mark.slow
def test_computed_tokens_are_suffix_and_links(fused_prefill):
    fused_prefill.check_whole()
    assert fused_prefill.has_picture("chart")
    total, suffix = (
        int(re.search(pattern, fused_prefill.printed("block"))[1]) for pattern in (r"^(\d+) tokens", r"suffix (\d+)")
    )
    rows = re.findall(r"^(\w+) +(\d+) +(\d+) +\S+  '.*'$", fused_prefill.printed("fuse"), re.M)
    computed = {method: (int(ran), int(of)) for method, ran, of in rows}
    assert computed["full"] == (total, total)
    assert computed["reposition"] == (suffix, total)
    links = K * LINK_TOKENS + 1  # and the one that says that no passage follows
    ran, of = computed["link"]
    assert ran == suffix + links
    assert of >= total + links  # one more says where passages begin; it is kept with the prefix


@pytest.mark.slow
def test_passages_read_apart_drift_and_links_repair_it(fused_prefill):
    drift = [float(share) for share in fused_prefill.printed("apart").split(":")[1].split()]
    assert drift[0] < 1e-4 < 0.01 < drift[1] < max(drift)
    right = dict(re.findall(r"^(\w+) +(\d) of 3 right", fused_prefill.printed("cut"), re.M))
    assert (right["full"], right["link"]) == ("3", "3")
    assert int(right["reposition"]) < 3


def table(printed: str) -> dict[str, tuple[int, int, float]]:
    """Return a table's cells by method: right, same as full prefill, share computed."""
    rows = re.findall(r"^(\w+) +(\d+)/8 +(\d+)/8 +(\d+)%$", printed, re.M)
    return {method: (int(right), int(same), int(share) / 100) for method, right, same, share in rows}


@pytest.mark.slow
def test_methods_are_compared(choosing):
    choosing.check_whole()

    plain, leaning = table(choosing.printed("plain")), table(choosing.printed("leaning"))
    assert list(plain) == list(leaning)
    for rows in (plain, leaning):
        assert rows["full"] == (rows["full"][0], 8, 1.0)
        assert rows["reposition"][2] < rows["link"][2] < rows["epic"][2] < 1
        assert rows["full"][0] >= 7
    assert plain["reposition"][0] >= 6
    assert plain["link"][0] >= 6
    assert leaning["reposition"][0] <= 4
    assert leaning["link"][0] >= 7
    assert leaning["epic"][0] >= 7
    assert choosing.has_picture("chart")
