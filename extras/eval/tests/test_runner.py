"""A run's figures against plain forward passes, and an interrupted run against an uninterrupted run."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from families import block_diagonal, oracle_logits, oracle_model
from plain_oracle import greedy, plain_transformers

from ragcache.errors import ConfigError, ContextTooLongError
from ragcache.prompt import Prompt, encode_text
from ragcache_eval.case import Case, CasePassage
from ragcache_eval.journal import Journal, Ledger, Score
from ragcache_eval.methods import MethodSpec, default_methods, parse_methods
from ragcache_eval.reading import WrittenAnswer
from ragcache_eval.report import markdown, summarise
from ragcache_eval.runner import NO_PASSAGES, Runner, RunSettings

TEXTS = ("The cat sat on the mat.", "Dogs bark at night.", "The river Arno rises in the hills.")
CASES = [
    Case("a", "Where did the cat sit?", tuple(map(CasePassage, TEXTS)), ("on the mat",)),
    Case("b", "Who barks?", (CasePassage(TEXTS[1]), CasePassage(TEXTS[0])), ("dogs", "some dogs")),
    Case("c", "What rises?", (CasePassage(TEXTS[2]),), ()),
]
TIMES = ("encode_s", "place_s", "prefill_s", "ttft_s")


def untimed(score: Score) -> Score:
    return replace(score, **dict.fromkeys(TIMES))


def numpy_kl(reference: torch.Tensor, other: torch.Tensor) -> np.ndarray:
    p, q = (np.exp(x.double().numpy() - x.double().numpy().max(-1, keepdims=True)) for x in (reference, other))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    return (p * np.log(p / q)).sum(-1)


def test_distances_along_the_reference_answer_against_plain_transformers(runner, tiny_directory):
    """The oracle of law 1, for every prefix of the answer: the answer's tokens are part of the suffix."""
    case = CASES[0]
    score = list(runner.run([case], parse_methods(["reposition"]), Ledger()))[-1]
    model = oracle_model(str(tiny_directory))
    prompt = case.prompt(runner.lm.tokenizer, runner.form)
    answer = encode_text(runner.lm.tokenizer, " on the mat")[:6]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt.ids, *answer]])).logits[0]
    full = logits[prompt.num_tokens - 1 : prompt.num_tokens + 5]
    rows = []
    for count in range(len(answer)):
        longer = Prompt(prompt.prefix_ids, prompt.chunk_ids, [*prompt.suffix_ids, *answer[:count]])
        rows.append(oracle_logits(model, longer, block_diagonal(longer)))
    blocked = torch.stack(rows)
    kl = numpy_kl(full, blocked)
    assert kl.max() > 1e-3  # a comparison of equal things would show nothing
    assert score.kl_first == pytest.approx(kl[0], rel=1e-3, abs=1e-6)
    assert score.kl_answer == pytest.approx(kl.mean(), rel=1e-3, abs=1e-6)
    agrees = full.argmax(-1) == blocked.argmax(-1)
    assert score.top1_answer == pytest.approx(agrees.double().mean())
    assert score.top1_first is bool(agrees[0])


@pytest.mark.parametrize(("tail", "written"), [("", "on the mat"), ("A:\n", "on the mat"), ("A:", " on the mat")])
def test_a_reference_answer_has_a_space_where_the_prompt_has_none(runner, tail, written):
    other = Runner(runner.lm, replace(runner.form, tail=tail), RunSettings(max_tokens=20))
    assert other._reference_ids(CASES[0], WrittenAnswer("", ())) == encode_text(runner.lm.tokenizer, written)


def test_predictions_are_greedy_answers_and_the_baseline_reads_no_passage(runner, tiny_directory):
    none, full = runner.run([CASES[0]], parse_methods(["full"]), Ledger())
    model, tokenizer = plain_transformers(str(tiny_directory))
    prompt = CASES[0].prompt(tokenizer, runner.form)
    assert full.prediction == greedy(model, tokenizer, prompt, None, 6).strip()
    alone = Prompt(prompt.prefix_ids, [], prompt.suffix_ids)
    assert none.prediction == greedy(model, tokenizer, alone, None, 6).strip()
    assert none.method == NO_PASSAGES
    assert none.kl_answer is None


def test_costs_are_counted(runner):
    specs = parse_methods(["reposition", "epic:first_tokens=2"])
    _, full, reposition, epic = runner.run([CASES[0]], specs, Ledger())
    prompt = CASES[0].prompt(runner.lm.tokenizer, runner.form)
    assert full.computed_share == full.kept_share == 1.0
    assert reposition.computed_share == pytest.approx(len(prompt.suffix_ids) / prompt.num_tokens)
    assert epic.computed_share == pytest.approx(
        (len(prompt.suffix_ids) + 2 * len(prompt.chunk_ids)) / prompt.num_tokens
    )
    assert (full.kl_answer, full.top1_answer, full.same_answer) == (0.0, 1.0, True)


def test_one_chunk_behind_the_prefix_is_full_prefill(runner):
    """Law 2 through the runner: CASES[2] has a single passage and no gold answer."""
    score = list(runner.run([CASES[2]], parse_methods(["reposition:recipe=prefix"]), Ledger()))[-1]
    assert score.kl_answer == pytest.approx(0.0, abs=1e-6)
    assert score.same_answer
    assert score.accuracy is None


def test_an_interrupted_run_goes_on_to_the_same_results(runner, tmp_path):
    specs = parse_methods(["reposition", "concat"])
    with Journal(tmp_path / "whole.jsonl", runner.describe()) as journal:
        whole = [untimed(score) for score in runner.run(CASES, specs, journal)]
    path = tmp_path / "cut.jsonl"
    with Journal(path, runner.describe()) as journal:
        for _, score in zip(range(6), runner.run(CASES, specs, journal), strict=False):
            last = score
    assert last.case == "b"
    with path.open("ab") as file:
        file.write(b'{"case": "b", "metho')  # killed while it wrote
    lines = path.read_bytes().count(b"\n")
    with Journal(path, runner.describe()) as journal:
        assert len(journal.done) == lines - 1
        assert [untimed(score) for score in runner.run(CASES, specs, journal)] == whole
    assert path.read_bytes().count(b"\n") == 1 + len(whole)


def test_what_is_done_is_not_measured_again(runner, tmp_path, monkeypatch):
    path, specs = tmp_path / "j.jsonl", parse_methods(["reposition"])
    with Journal(path, runner.describe()) as journal:
        first = list(runner.run(CASES[:1], specs, journal))
    with Journal(path, runner.describe()) as journal:
        monkeypatch.setattr(Runner, "_measure", lambda *given: pytest.fail("measured again"))
        assert list(runner.run(CASES[:1], specs, journal)) == first
    monkeypatch.undo()
    changed = replace(CASES[0], question="Where did it sit?")
    with Journal(path, runner.describe()) as journal:
        assert list(runner.run([changed], specs, journal))[1].digest != first[1].digest
        more = parse_methods(["reposition", "concat"])  # the new method is measured, the others are in the journal
        assert list(runner.run(CASES[:1], more, journal))[:3] == first


def test_other_settings_are_refused(runner, tiny, tmp_path):
    Journal(tmp_path / "j.jsonl", runner.describe()).close()
    other = Runner(tiny, runner.form, RunSettings(max_tokens=7))
    with pytest.raises(ConfigError, match="made with max_tokens 6, not 7"):
        Journal(tmp_path / "j.jsonl", other.describe())
    (tmp_path / "x.jsonl").write_text("hello\n")
    with pytest.raises(ConfigError, match="line 1: not JSON"):
        Journal(tmp_path / "x.jsonl", {})


def test_questions_that_do_not_fit(tiny, runner):
    long = Case("long", "Q?", (CasePassage("word " * 800),), ("x",))
    with pytest.raises(ContextTooLongError, match="long: prompt and answer take"):
        list(runner.run([long], parse_methods(["full"]), Ledger()))
    skipping = Runner(tiny, runner.form, RunSettings(max_tokens=6, on_overflow="skip"))
    specs = parse_methods(["reposition"])
    scores = list(skipping.run([long, CASES[0]], specs, Ledger()))
    rows = summarise(scores, {spec.key: spec.label for spec in specs})
    assert [(row.questions, row.skipped) for row in rows] == [(1, 1), (1, 1)]
    assert "(1 skipped)" in markdown("t", {}, rows)


def test_reports_break_down_by_cell(runner):
    cases = [replace(case, cell={"gold_position": rank}) for rank, case in enumerate(CASES[:2])]
    specs = parse_methods(["moved=reposition"])
    scores = list(runner.run(cases, specs, Ledger()))
    rows = summarise(scores, {spec.key: spec.label for spec in specs})
    assert [(row.method, dict(row.cell)) for row in rows] == [
        ("full", {}),
        ("moved", {}),
        ("full", {"gold_position": 0}),
        ("moved", {"gold_position": 0}),
        ("full", {"gold_position": 1}),
        ("moved", {"gold_position": 1}),
    ]
    f1 = [score.f1 for score in scores if score.method == specs[1].key]
    assert rows[1].quality["f1"].mean == pytest.approx(np.mean(f1))
    text = markdown("title", {"data": "d"}, rows)
    assert "## gold_position 1" in text
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1


def test_method_specs():
    spec = MethodSpec.parse("fast=epic:first_tokens=3:recipe=prefix")
    assert (spec.label, spec.name, spec.options, spec.recipe) == ("fast", "epic", (("first_tokens", 3),), "prefix")
    assert spec.method().first_tokens == 3
    assert spec.key == MethodSpec.parse("epic:recipe=prefix:first_tokens=3").key
    assert [s.label for s in parse_methods(["concat,reposition"])] == ["full", "concat", "reposition"]
    *_, profiled, last = parse_methods(["concat,prophet:layers=[1,2]:ratio=0.1,reposition"])
    assert (profiled.options, last.name) == ((("layers", [1, 2]), ("ratio", 0.1)), "reposition")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("none", "method 'none' is unknown"),
        ("epic:tokens=3", "no option tokens"),
        ("epic:first_tokens", "no setting"),
        ("epic:first_tokens=-1", "first_tokens is -1"),
        ("reposition:recipe=other", "takes recipe"),
        ("a=concat,a=reposition", "two methods are called 'a'"),
        ("concat,x=concat", "asked for twice"),
    ],
)
def test_bad_method_specs_are_named(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_methods([text])


def test_default_methods_leave_out_what_wants_training(tiny):
    names = [spec.name for spec in default_methods(tiny)]
    assert names[0] == "full"
    assert {"reposition", "concat", "epic"} <= set(names)
    assert "link" not in names


def test_a_share_of_the_kv_is_part_of_a_method(runner):
    """Half of the KV is held and counted, all KV equals the plain method, and each has its own key."""
    specs = parse_methods(["reposition", "half=reposition:kept=0.5", "all=ape:kept=1"])
    assert len({spec.key for spec in specs}) == 4
    scores = {score.method: score for score in runner.run(CASES[:1], specs, Ledger())}
    keys = {spec.label: spec.key for spec in specs}
    whole, half = scores[keys["reposition"]], scores[keys["half"]]
    assert whole.kept_share == 1
    assert 0.5 < half.kept_share < 0.9
    assert half.computed_share == whole.computed_share
    for wrong, message in (
        ("cacheblend:kept=0.5", "needs blocks that hold all"),
        ("full:kept=0.5", "needs blocks that hold all"),
        ("reposition:kept=0", "above 0"),
        ("reposition:kept=half", "above 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_methods([wrong])
