"""Invalid values of a method's options are refused when the method is made, with the way out."""

import math
import re

import pytest

from ragcache.errors import ConfigError
from ragcache.fusion import get_method

SHARES = [-0.01, 1.01, math.nan, math.inf, "0.5", None, True]
COUNTS = [-1, 1.5, "many", None, True]
WIDTHS = [0, -1, 4, 2.5, True]
NO_NUMBERS = [math.nan, math.inf, True, "1"]
REFUSED = {
    ("a3", "ratio"): (SHARES, "from 0 to 1"),
    ("a3", "pool_tokens"): (WIDTHS, ""),
    ("prophet", "ratio"): (SHARES, "from 0 to 1"),
    ("prophet", "pool_tokens"): (WIDTHS, ""),
    ("prophet", "layers"): ([[], [-1], [1.5], [True], 3, "12", [None]], r"such as \[4, 9\]"),
    ("samkv", "block_size"): ([0], ""),
    ("samkv", "initial_blocks"): ([0], ""),
    ("samkv", "local_blocks"): ([-1], ""),
    ("samkv", "stable_layers"): ([0], ""),
    ("samkv", "top_p"): ([1.5], ""),
    ("samkv", "recompute"): (["some"], ""),
    ("samkv", "update"): (["mix"], ""),
    **{
        (method, option): (COUNTS, "0 or more")
        for method in ("cacheblend", "a3", "prophet")
        for option in ("boundary_tokens", "tail_tokens")
    },
    ("ape", "temperature"): ([0], ""),
    ("ape", "scale"): ([math.nan], ""),
}


def said(method: str, option: str, value: object) -> str:
    try:
        get_method(method, **{option: value})
    except ConfigError as error:
        return str(error)
    return f"{value!r} is taken"


@pytest.mark.parametrize(("method", "option"), REFUSED)
def test_what_is_no_value_of_an_option_is_refused(method, option):
    values, words = REFUSED[method, option]
    for value in values:
        assert re.match(f"{option} .*{words}", said(method, option, value))
