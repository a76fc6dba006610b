"""The engine goes by what `ragcache check` found."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest

from ragcache.engine.verdict import FILE, MethodVerdict, Verdict, load_verdict, save_verdict
from ragcache.fusion import get_method

CHEAP = MethodVerdict("concat", {}, "isolated", False, "top-1 agreement 0.5 is below 0.95", 0.05)
SAFE = MethodVerdict("epic", {"first_tokens": 3}, "isolated", True, "", 0.2, {"kl_answer": 0.01})
DEARER = MethodVerdict("epic", {"first_tokens": 9}, "prefix", True, "", 0.4, {"kl_answer": 0.0})


@pytest.fixture
def verdict(lm) -> Verdict:
    return Verdict(lm.fingerprint, "tiny", "tests", 10, {"min_agreement": 0.95}, (CHEAP, DEARER, SAFE))


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_it_survives_the_disk(tmp_path, verdict):
    save_verdict(tmp_path, verdict)
    save_verdict(tmp_path, replace(verdict, fingerprint="other", methods=()))
    assert load_verdict(tmp_path, verdict.fingerprint) == verdict
    assert load_verdict(tmp_path, "other").methods == ()
    assert load_verdict(tmp_path, "third") is None


def test_the_best_is_the_cheapest_safe_one_of_the_recipe(verdict):
    assert verdict.best() == SAFE
    assert verdict.best("prefix") == DEARER
    assert replace(verdict, methods=(CHEAP,)).best() is None
    nearer = replace(SAFE, name="reposition", options={}, figures={"kl_answer": 0.001})
    assert replace(verdict, methods=(SAFE, nearer)).best() == nearer


def test_auto_takes_the_best(kb, open_kb, verdict):
    save_verdict(kb.store.layout.root, verdict)
    again = open_kb(method="auto")
    assert again.ask("Where do dogs bark?").method == "epic"
    assert again._parts.choice.method == get_method("epic", first_tokens=3)
    assert kb.ask("Where do dogs bark?", method="auto").method == "epic"


def test_auto_reads_whole_prompts_where_nothing_is_safe(kb, open_kb, verdict, caplog):
    save_verdict(kb.store.layout.root, replace(verdict, methods=(CHEAP,)))
    assert open_kb(method="auto").ask("Where do dogs bark?").method == "full"
    assert "no method passed" in warnings_of(caplog)[-1]


def test_a_method_that_failed_is_warned_of(kb, open_kb, verdict, caplog):
    save_verdict(kb.store.layout.root, verdict)
    open_kb(method="epic", first_tokens=3)
    kb.ask("Where do dogs bark?", method="reposition")  # nobody checked it
    assert warnings_of(caplog) == []
    open_kb(method="concat")
    kb.ask("Where do dogs bark?", method="concat")
    assert [text for text in warnings_of(caplog) if "'concat' failed" in text and "below 0.95" in text] == warnings_of(
        caplog
    )
    assert len(warnings_of(caplog)) == 2


@pytest.mark.parametrize("content", ["{", '{"version": 99, "verdicts": {}}', "[]"])
def test_a_file_that_cannot_be_read_is_no_verdict(tmp_path, caplog, content):
    (tmp_path / FILE).write_text(content)
    assert load_verdict(tmp_path, "any") is None
    assert FILE in warnings_of(caplog)[0]


def test_a_verdict_with_unknown_fields_is_none(tmp_path, verdict, caplog):
    path = save_verdict(tmp_path, verdict)
    found = json.loads(path.read_text())
    found["verdicts"][verdict.fingerprint]["strange"] = 1
    path.write_text(json.dumps(found))
    assert load_verdict(tmp_path, verdict.fingerprint) is None
    assert "check` again" in warnings_of(caplog)[0]
