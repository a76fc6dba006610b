"""The pictures of docs/how-it-works.md equal those that the script draws."""

import pytest

from tools import pictures


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_committed_picture_is_what_the_script_draws(name):
    assert (pictures.IMAGES / f"{name}.svg").read_text(encoding="utf-8") == pictures.picture(name)
