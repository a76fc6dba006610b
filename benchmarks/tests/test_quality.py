"""The quality table at toy size: its arithmetic, its sections, and that a stopped run goes on."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

import ragcache as rc
from benchmarks import pages, quality, quality_plot, quality_units, random_model
from benchmarks.pages import write_section
from benchmarks.quality import Cell, Row, markdown, relative
from benchmarks.quality_units import Answers, Reads, Unit, units_of
from ragcache.engine.verdict import MethodVerdict, Verdict
from ragcache.errors import ConfigError
from ragcache.prompt import prompt_format
from ragcache_eval.methods import MethodSpec, parse_methods
from ragcache_eval.reading import write_answer
from ragcache_eval.registry import PagesSettings, pages_cases

BASE = "mini-long"
SPECS = (MethodSpec("full", "full"), MethodSpec("reposition", "reposition"))
SMALL = ["--questions=9", "--few-questions=3", "--passages", "2", "--kinds", "single", "leaning", "--processes=1"]


def test_relative_is_the_ratio_of_right_answers():
    ours, theirs = [1] * 80 + [0] * 20, [1] * 90 + [0] * 10
    ratio, low, high = relative(ours, theirs)
    assert ratio == pytest.approx(80 / 90)
    assert low < ratio < high
    assert relative(theirs, theirs) == (1.0, 1.0, 1.0)  # paired: the same questions are missed
    unpaired = relative(theirs, list(np.random.default_rng(0).permutation(theirs)))
    assert unpaired[1] < 1.0 < unpaired[2]
    apart = relative(ours, theirs, [str(number) for number in range(100)])
    assert apart == pytest.approx((ratio, low, high), abs=0.03)
    together = relative(ours, theirs, [str(number // 10) for number in range(100)])
    assert together[0] == ratio
    assert together[2] - together[1] > 1.5 * (high - low), "questions over one context are missed together"


def test_methods_that_rerun_tokens_come_at_every_budget():
    specs = parse_methods(quality.budgeted_methods())
    ratios = [dict(spec.options)["ratio"] for spec in specs if spec.name == "a3"]
    assert ratios == list(quality.BUDGETS)
    whole = [sum(dict(spec.options).values()) for spec in specs if spec.name == "epic"]
    assert whole == [tokens for share in quality.BUDGETS for tokens in [round(share * 225)] * 2]


def test_units_cover_every_question_once():
    units = list(units_of("d", "f", [Cell("single", 8), Cell("two-hop", 8)], SPECS, 120, 0))
    assert [(unit.start, unit.count) for unit in units] == [(0, 50), (50, 50), (100, 20)] * 2
    keys = {unit.key(spec) for unit in units for spec in SPECS}
    assert len(keys) == len(units) * len(SPECS)


@pytest.mark.slow
def test_a_run_writes_its_table_and_goes_on(tmp_path, monkeypatch):
    arguments = [*SMALL, "--checkpoint", f"base={BASE}", "--methods", "base:reposition,epic", "--out", str(tmp_path)]
    first = quality.main(arguments)
    rows = first.figures["rows"]
    assert {row["method"] for row in rows} == {"full", "reposition", "epic"}
    assert all(row["low"] <= row["exact_match"] <= row["high"] for row in rows)
    assert {row["computed_share"] for row in rows if row["method"] == "full"} == {1.0}
    assert all(0 < row["computed_share"] < 0.9 for row in rows if row["method"] == "epic")
    regime = first.figures["regime"]["leaning, 2"]
    assert 150 <= regime["passage_tokens"] <= 300
    assert (regime["passages"], regime["questions"], regime["seed"], regime["reads"]) == (2, 3, 0, 1)
    assert (tmp_path / "quality.png").stat().st_size > 10_000
    assert not first.goals  # stated for 8 passages
    path = tmp_path / "quality.answers.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])  # killed while it wrote
    done: list[Unit] = []
    run = quality_units.run_unit
    monkeypatch.setattr(quality_units, "run_unit", lambda unit: done.append(unit) or run(unit))
    again = quality.main(arguments).figures
    assert again["regime"] == first.figures["regime"]
    assert [timeless(row) for row in again["rows"]] == [timeless(row) for row in rows]
    assert 1 <= len(done) <= 2
    assert path.read_bytes().count(b"\n") == len(lines)


LEANING = ["--kinds=leaning", "--passages=4", "--few-questions=16", "--processes=1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "method"), [("mini-long-link", "link"), ("mini-long", "reposition:neighbours=1")], ids=["link", "behind"]
)
def test_what_leans_across_pages_is_answered(tmp_path, model, method):
    """Answered with trained link tokens, and where pages were read behind those before them in their document;
    blocks that know nothing of each other guess among two."""
    methods = f"--methods=a:{method},reposition"
    made = quality.main([*LEANING, f"--checkpoint=a={model}", methods, "--out", str(tmp_path)])
    rows = {row["method"]: row for row in made.figures["rows"] if not row["by"]}
    assert rows[method]["exact_match"] >= 0.75
    assert rows["reposition"]["exact_match"] <= 0.6
    assert rows[method]["computed_share"] < 0.15


def timeless(row: dict[str, object]) -> str:
    """A row without what a second run measures anew, as text: NaN is like NaN there."""
    return json.dumps({name: value for name, value in row.items() if name != "first_token"})


@pytest.mark.slow
def test_rows_of_a_checkpoint_that_is_gone_are_kept(tmp_path):
    arguments = [*SMALL, "--checkpoint", f"base={BASE}", "--methods", "base:full", "--out", str(tmp_path)]
    first = quality.main([*arguments, "--checkpoint", f"gone={BASE}", "--methods", "gone:full"])
    gone = [row for row in first.figures["rows"] if row["checkpoint"] == "gone"]
    second = quality.main([*arguments, "--keep", "gone", "--keep", "base"])
    assert [row for row in second.figures["rows"] if row["checkpoint"] == "gone"] == gone
    assert len(second.figures["rows"]) == len(first.figures["rows"])
    third = quality.main([*arguments[:-3], "base:reposition", *arguments[-2:], "--keep", "gone", "--keep", "base"])
    assert [row["method"] for row in third.figures["rows"] if row["checkpoint"] == "base"].count("full") == len(
        [row for row in first.figures["rows"] if row["checkpoint"] == "base"]
    ), "methods that are read anew stand once"
    with pytest.raises(ConfigError, match="no rows of other"):
        quality.main([*arguments, "--keep", "other"])
    with pytest.raises(ConfigError, match="no rows of gone with seed 1"):
        quality.main([*arguments, "--keep", "gone", "--seed", "1"])


@pytest.mark.slow
def test_the_full_model_answers_most_questions():
    """Right answers are counted as right, and none as wrong: the bundled model knows nearly all of them."""
    unit = Unit(BASE, "f", Cell("single", 2), 0, 0, 10, SPECS)
    found = quality_units.run_unit(unit)
    assert set(found) == {unit.key(spec) for spec in SPECS}
    assert all(len(reads.right) == 10 and sum(reads.right) >= 8 for reads in found.values())


def test_an_answer_counts_when_it_is_the_whole_one():
    lm = rc.load_lm(BASE)
    case = next(iter(pages_cases(PagesSettings("single", (2,), 1))))
    fused = rc.fuse(lm, case.prompt(lm.tokenizer, prompt_format(lm.tokenizer)), "full", reserve_tokens=40)
    assert write_answer(lm, fused, 40).text == case.answers[-1]
    assert quality_units.answers(lm, fused, case)
    assert not quality_units.answers(lm, fused, replace(case, answers=(case.answers[0],)))


@pytest.mark.slow
def test_shares_of_tokens_are_counted():
    """Nothing runs beside the suffix under `reposition`; what the prompts hold says how much that is."""
    unit = Unit(BASE, "f", Cell("single", 2), 0, 2, 3, SPECS)
    full, reposition = (quality_units.run_unit(unit)[unit.key(spec)] for spec in SPECS)
    assert (full.computed, full.kept) == ([1.0] * 3, [1.0] * 3)
    lm = rc.load_lm(BASE)
    cases = pages_cases(PagesSettings("single", (2,), 5))[2:]
    prompts = [case.prompt(lm.tokenizer, prompt_format(lm.tokenizer)) for case in cases]
    suffixes = [len(prompt.suffix_ids) / prompt.num_tokens for prompt in prompts]
    assert reposition.computed == pytest.approx(suffixes, abs=1e-6)
    assert reposition.kept == [1.0] * 3
    assert all(own < theirs for own, theirs in zip(reposition.seconds, full.seconds, strict=True))


@pytest.mark.slow
def test_questions_over_one_context_are_read_as_by_themselves():
    """Each against a unit of its own, which reads its context anew."""
    specs = (*SPECS, MethodSpec("epic", "epic"))
    unit = Unit(BASE, "f", Cell("leaning", 4), 0, 0, 6, specs, asked=2)
    cases = quality_units.cases_of(unit.cell, 6, 0, 2)
    assert len({case.cluster for case in cases}) == 3
    assert len({case.question for case in cases}) == 6
    together = quality_units.run_unit(unit)
    alone = [quality_units.run_unit(replace(unit, start=start, count=1)) for start in range(6)]
    for spec in specs:
        reads = together[unit.key(spec)]
        parts = [one[replace(unit, start=start, count=1).key(spec)] for start, one in enumerate(alone)]
        assert reads.right == [part.right[0] for part in parts]
        if spec.name != "full":
            assert reads.computed == [part.computed[0] for part in parts]
    full = together[unit.key(SPECS[0])]
    assert full.computed == [1.0] * 6
    assert full.seconds[0] == full.seconds[1] != full.seconds[2] == full.seconds[3]


def test_answers_that_are_none_are_named(tmp_path: Path):
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps({"key": "k", **Reads([1], [0.5], [1.0], [0.1])._asdict()}) + "\n[]\n")
    with pytest.raises(ConfigError, match="line 2"):
        Answers(path)


def test_sections_are_written_anew(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- quality: begin -->\nold\n<!-- quality: end -->\nafter\n")
    write_section(page, "quality", ["| a |", "|---|"])
    assert page.read_text() == "before\n<!-- quality: begin -->\n\n| a |\n|---|\n\n<!-- quality: end -->\nafter\n"
    with pytest.raises(ConfigError, match="has no section <!-- costs"):
        write_section(page, "costs", ["x"])


def test_the_page_of_methods_is_up_to_date(tmp_path: Path):
    """Its table of methods is the one that the command writes, and every method has a part of its own."""
    page = Path(tmp_path / "methods.md")
    text = (pages.DOCS / pages.METHODS_PAGE).read_text(encoding="utf-8")
    page.write_text(text, encoding="utf-8")
    write_section(page, "methods", pages.methods_table())
    assert page.read_text(encoding="utf-8") == text
    assert set(re.findall(r"^### `(\w+)`", text, re.M)) == set(rc.METHODS)


def test_pages_are_written_out_of_the_results(tmp_path: Path):
    """The committed pages hold what the committed results say."""
    for name in (pages.METHODS_PAGE, pages.RESULTS_PAGE):
        (tmp_path / name).write_text((pages.DOCS / name).read_text(encoding="utf-8"), encoding="utf-8")
    pages.main(["--docs", str(tmp_path)])
    for name in (pages.METHODS_PAGE, pages.RESULTS_PAGE):
        assert (tmp_path / name).read_text(encoding="utf-8") == (pages.DOCS / name).read_text(encoding="utf-8")
    assert pages.public_lines(tmp_path) == ["Not measured: run `ragcache eval`."]


def row(method, kind, relative=1.0, computed=0.1, checkpoint="base", questions=1000, by=""):
    return Row(
        checkpoint, method, kind, 8, questions, 0.9, 0.8, 0.95, relative, relative, relative, computed, 1.0, 0.1, by
    )


def test_tables_have_even_rows_and_places_of_their_own():
    rows = [row(method, kind) for method in ("full", "reposition") for kind in ("single", "leaning")]
    rows += [row(method, "leaning", by=place) for method in ("full", "reposition") for place in ("end", "head")]
    text = "\n".join(markdown(rows))
    assert "8 passages, 1,000 questions a cell:" in text
    assert "8 passages, leaning, by place, 1,000 questions a cell:" in text
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 2 * (2 + 2)
    assert len({line.count("|") for line in table}) == 1


def test_a_method_looks_alike_in_all_panels():
    """A method that the first panel lacks changes neither the others' colours nor what the legend says."""
    rows = [row("full", "single"), row("a3", "single"), row("full", "leaning")]
    rows += [row("prophet", "leaning", 0.9), row("a3", "leaning", 0.8)]
    figure = quality_plot.draw([asdict(one) for one in rows])
    drawn = [{line.get_label(): (line.get_color(), line.get_marker()) for line in ax.lines} for ax in figure.axes]
    named = {name: {panel[name] for panel in drawn if name in panel} for name in ("full", "a3", "prophet")}
    assert [len(looks) for looks in named.values()] == [1, 1, 1]
    assert len(set.union(*named.values())) == 3
    (legend,) = figure.legends
    keys = zip(legend.get_lines(), legend.get_texts(), strict=True)
    assert {text.get_text(): {(line.get_color(), line.get_marker())} for line, text in keys} == named


def test_the_best_method_of_a_budget_is_held_against_its_goal():
    """One that computes more does not count, however well it answers."""
    rows = [row("full", "single", 1.0, 1.0), row("reposition", "single", 0.5, 0.02), row("a3", "single", 0.96, 0.17)]
    rows += [row("cacheblend", "single", 1.0, 0.3)]
    found = {goal.what: goal for goal in quality.goals(rows)}
    best = found["best training-free method at 15 % computed, single"]
    assert (best.measured, best.limit, best.applies) == (0.96, 0.97, True)
    few = quality.goals([replace(one, questions=999) for one in rows])
    assert not any(goal.applies for goal in few)


def test_what_auto_takes_is_held_against_its_goal(tmp_path: Path):
    """By the verdict on these weights: the cheapest method that is safe, full prefill where none is."""
    rows = [row("full", "single", 1.0, 1.0), row("reposition", "single", 0.9), row("a3:ratio=0.2", "single", 0.98)]
    rows += [
        row("full", "leaning", 1.0, 1.0),
        row("reposition", "leaning", 0.2),
        row("reposition", "leaning", by="end"),
    ]

    def verdict(kind, safe, fingerprint="f"):
        methods = [MethodVerdict("reposition", {}, "isolated", safe == "reposition", computed_share=0.01)]
        methods += [MethodVerdict("a3", {"ratio": 0.2}, "isolated", safe in {"a3", "reposition"}, computed_share=0.2)]
        written = Verdict(fingerprint, "m", "s", 50, {}, methods).to_json()
        (tmp_path / "check").mkdir(exist_ok=True)
        (tmp_path / "check" / f"{kind}.json").write_text(json.dumps(written))
        found = quality.auto_rows(rows, tmp_path, "f")
        return [(one.method, one.kind) for one in found]

    assert verdict("single", "a3") == [("a3:ratio=0.2", "single")]
    assert verdict("leaning", "none") == [("a3:ratio=0.2", "single"), ("full", "leaning")]
    assert verdict("leaning", "reposition") == [("a3:ratio=0.2", "single"), ("reposition", "leaning")]
    found = {goal.what: goal for goal in quality.goals(rows, quality.auto_rows(rows, tmp_path, "f"))}
    assert found["what `auto` takes (`reposition`), leaning"].measured == 0.2
    assert found["what `auto` takes (`a3:ratio=0.2`), single"].limit == 0.97
    assert verdict("leaning", "reposition", "other") == [("a3:ratio=0.2", "single")]


def test_a_random_model_of_a_shape_loads_as_any_other(tmp_path: Path):
    random_model.main([str(tmp_path), "--shape", "toy"])
    lm = rc.load_lm(tmp_path)
    assert lm.shape.num_layers == 2
    assert max(lm.tokenizer("Any text at all.")["input_ids"]) < lm.vocab_size
