"""Answers of a model to question sets: the choice of questions, a stopped run, and figures against figures made by
hand.
"""

import gzip
import json
import math
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from families import block_diagonal, oracle_logits, oracle_model
from tiny_model import save_tiny_llama

import ragcache as rc
from benchmarks import answers, plots
from benchmarks.answers import choose, every_method, fitted, in_turn, short_answers
from benchmarks.answers_report import FEWEST_QUESTIONS, Row, figures_of, interval, label, markdown, ratio, table
from benchmarks.runner import main
from ragcache.errors import ConfigError
from ragcache.prompt import Prompt
from ragcache_eval.case import Case, CasePassage
from ragcache_eval.journal import Journal, Score
from ragcache_eval.methods import parse_methods
from ragcache_eval.runner import NO_PASSAGES

PLACES = ("Aabo", "Brugge", "Chur", "Delft", "Evora")
TIMES = ("encode_s", "place_s", "prefill_s", "ttft_s")


def question(number: int, **more: object) -> dict[str, object]:
    documents = [{"text": f"Ship {n} is at {place}.", "is_gold": n == number % 5} for n, place in enumerate(PLACES)]
    gold = documents.pop(number % 5)
    return {
        "id": f"q{number}",
        "question": f"Where is ship {number % 5}?",
        "answers": [PLACES[number % 5]],
        "documents": [gold, *documents],
        **more,
    }


def write_lines(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Return a directory with a set that names positions of its gold passage, a set that does not, and a set over a
    corpus.
    """
    folder = tmp_path_factory.mktemp("data")
    moved = {"meta": {"gold_positions": [0, 1, 2, 3, 4]}}
    write_lines(folder / "dev/moved.jsonl.gz", [question(number, **moved) for number in range(7)])
    write_lines(folder / "dev/plain.jsonl.gz", [question(number) for number in range(3)])
    write_lines(
        folder / "corpus/ships.jsonl.gz",
        [{"id": f"p{n}", "text": f"Ship {n} is at {place}."} for n, place in enumerate(PLACES)],
    )
    asked = {"documents": [], "meta": {"corpus": "ships", "gold_ids": ["p2"]}}
    write_lines(folder / "dev/harbours.questions.jsonl.gz", [{**question(2), **asked}])
    return folder


@pytest.fixture(scope="module")
def tiny_directory(tmp_path_factory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("asked"), positions=2048)


@pytest.fixture(scope="module")
def tiny(tiny_directory) -> rc.LanguageModel:
    return rc.load_lm(tiny_directory)


@pytest.fixture
def arguments(tiny_directory, data, tmp_path) -> list[str]:
    out = ["--out", str(tmp_path), "--name", "found", "--methods", "reposition,epic:first_tokens=4"]
    return ["--model", str(tiny_directory), "--data", str(data), "--sets", "plain", "moved", "--questions", "3", *out]


def untimed(path: Path, settings: dict[str, object]) -> list[Score]:
    with Journal(path, settings) as journal:
        return [replace(score, **dict.fromkeys(TIMES)) for score in journal.done.values()]


def settings_in(path: Path) -> dict[str, object]:
    settings = json.loads(path.read_bytes().splitlines()[0])["settings"]
    return {name: value for name, value in settings.items() if name != "version"}


def timeless(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    return [{name: value for name, value in row.items() if not name.startswith("first_token")} for row in rows]


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_as_one_that_was_not(arguments, tmp_path, monkeypatch):
    whole = main("answers", [*arguments, "--journal", str(tmp_path / "whole.jsonl")])
    settings = settings_in(tmp_path / "whole.jsonl")
    lines = (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + 6 * 4  # settings; no passages, full and two methods on six questions
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(b"".join(lines[:11]) + lines[11][:40])  # killed within a question, while it wrote
    written: list[str] = []
    add = Journal.add
    monkeypatch.setattr(Journal, "add", lambda self, score: written.append(score.case) or add(self, score))
    again = main("answers", [*arguments, "--journal", str(torn)])
    assert len(written) == 24 - 10
    assert untimed(torn, settings) == untimed(tmp_path / "whole.jsonl", settings)
    assert timeless(again.figures["rows"]) == timeless(whole.figures["rows"])


def test_time_that_is_up_ends_a_run_between_questions_and_the_report_says_so(arguments, tmp_path, monkeypatch):
    clock = count()
    monkeypatch.setattr(answers, "time", SimpleNamespace(monotonic=lambda: next(clock)))  # each question takes a second
    found = main("answers", [*arguments, "--minutes", str(2.5 / 60)])
    assert {row["questions"] for row in found.figures["rows"] if row["set"] == "plain"} == {1}
    assert {row["questions"] for row in found.figures["rows"] if row["set"] == "all"} == {2}
    text = (tmp_path / "found.md").read_text(encoding="utf-8")
    assert "| `reposition` | 2 of 6 |" in text
    assert "| `reposition` | 1 of 3 |" in text
    assert len(found.figures["runs"]) == 1
    assert found.figures["runs"][0]["clean"] is found.environment.clean
    monkeypatch.undo()
    before = (tmp_path / "found.journal.jsonl").read_bytes()
    none = main("answers", [*arguments, "--minutes", "0"])
    assert timeless(none.figures["rows"]) == timeless(found.figures["rows"])
    assert len(none.figures["runs"]) == 1, "a report alone is no measurement"
    assert (tmp_path / "found.journal.jsonl").read_bytes() == before


def test_a_journal_of_other_settings_is_refused_by_name(arguments, tmp_path):
    journal = ["--minutes", "0", "--journal", str(tmp_path / "j.jsonl")]
    with pytest.raises(ConfigError, match="nothing was measured"):
        main("answers", [*arguments, *journal])
    main("answers", [*arguments, "--questions", "1", *journal[2:]])
    main("answers", [*arguments, "--questions", "2", "--sets", "plain", "--methods", "concat", *journal])
    for option, value in (("seed", "1"), ("context", "900"), ("dtype", "bfloat16")):
        with pytest.raises(ConfigError, match=f"was made with {option} "):
            main("answers", [*arguments, f"--{option}", value, *journal])


def test_questions_of_a_set_are_chosen_by_hash_and_positions_go_round(data):
    chosen = choose("moved", data, 0)
    golds = [case.passages.index(next(p for p in case.passages if p.is_gold)) for case in chosen]
    assert golds == [*range(5), 0, 1]
    names = [case.cluster for case in chosen]
    assert sorted(names) == [f"q{n}" for n in range(7)]
    assert names != sorted(names)
    assert [case.cluster for case in choose("moved", data, 1)] != names
    assert {case.cell["set"] for case in chosen} == {"moved"}
    (harbour,) = choose("harbours:passages=3", data, 0)
    assert len(harbour.passages) == 3
    assert [p.text for p in harbour.passages if p.is_gold] == ["Ship 2 is at Chur."]
    turns = in_turn({"a": chosen[:3], "b": [harbour]})
    assert [case.id for case in turns] == [chosen[0].id, harbour.id, chosen[1].id, chosen[2].id]


def test_passages_without_the_answer_are_dropped_from_the_end_where_a_prompt_is_too_long(data, tiny):
    form = short_answers(tiny)
    case = choose("moved", data, 0)[3]  # the gold passage is fourth
    for context in range(1, 500):
        less = fitted(case, tiny, form, context)
        wanted = [p for p in case.passages if less and p in less.passages]
        if less is None:
            continue
        assert list(less.passages) == wanted, "in their own order"
        assert any(p.is_gold for p in less.passages)
        assert less.prompt(tiny.tokenizer, form).num_tokens + answers.MAX_ANSWER_TOKENS <= context
        others = len(less.passages) - 1
        assert list(less.passages)[:others] == [p for p in case.passages if not p.is_gold][:others] or others > 3
    assert fitted(case, tiny, form, 500) == case
    assert fitted(case, tiny, form, 100) is None


def test_bad_data_is_named(data, tmp_path, tiny_directory):
    def ask(folder: Path, source: str, *more: str) -> None:
        place = ["--model", str(tiny_directory), "--data", str(folder), "--sets", source, "--out", str(tmp_path)]
        main("answers", [*place, "--questions", "1", "--methods", "full", *more])

    with pytest.raises(ConfigError, match=r"no question set 'nowhere'; it has .*moved, plain"):
        ask(data, "nowhere")
    write_lines(tmp_path / "dev/unanswered.jsonl.gz", [question(0), question(1, answers=[])])
    with pytest.raises(ConfigError, match="'q1' has no answer"):
        ask(tmp_path, "unanswered")
    (tmp_path / "broken.jsonl").write_text(json.dumps(question(0)) + "\n{'id': 1}\n")
    with pytest.raises(ConfigError, match=r"broken.jsonl, line 2: not JSON"):
        ask(tmp_path, "broken")
    with pytest.raises(ConfigError, match="no question fits into --context 60"):
        ask(data, "plain", "--context", "60")
    with pytest.raises(ConfigError, match="--questions is 0"):
        answers.Settings("m", data, questions=0)


def test_kl_is_taken_along_full_prefills_own_answer(arguments, tmp_path, tiny, tiny_directory, data):
    """The oracle is plain transformers: the answer's tokens are part of the suffix, under a block-diagonal mask."""
    main("answers", [*arguments, "--questions", "1", "--sets", "plain"])
    lines = [json.loads(line) for line in (tmp_path / "found.journal.jsonl").read_bytes().splitlines()[1:]]
    found = {line["method"]: line for line in lines}
    assert found["full@"]["kl_answer"] == 0.0
    case = choose("plain", data, 0)[0]
    prompt = case.prompt(tiny.tokenizer, short_answers(tiny))
    model = oracle_model(str(tiny_directory))
    ids: list[int] = []
    while len(ids) < answers.MAX_ANSWER_TOKENS and not set('\n"') & set(tiny.tokenizer.decode(ids)):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([[*prompt.ids, *ids]])).logits[0, -1].argmax()))
    assert tiny.tokenizer.eos_token_id not in ids
    distances = []
    for length in range(len(ids)):
        longer = Prompt(prompt.prefix_ids, prompt.chunk_ids, [*prompt.suffix_ids, *ids[:length]])
        with torch.no_grad():
            full = model(input_ids=torch.tensor([longer.ids])).logits[0, -1].double().softmax(-1)
        blocked = oracle_logits(model, longer, block_diagonal(longer)).double().softmax(-1)
        distances.append(float((full * (full / blocked).log()).sum()))
    assert fmean(distances) > 1e-3
    assert found["reposition@"]["kl_answer"] == pytest.approx(fmean(distances), rel=1e-3, abs=1e-6)


def score(source: str, number: int, method: str, right: bool, kl: float, share: float) -> Score:
    return Score(
        f"{source}/{number}",
        "d",
        method,
        str(number),
        {"set": source},
        accuracy=right,
        f1=0.5 * right,
        kl_answer=None if method == NO_PASSAGES else kl,
        same_answer=None if method == NO_PASSAGES else kl == 0,
        prompt_tokens=100 + number,
        kept_share=1.0,
        computed_share=share,
        ttft_s=2 * share,
    )


def made() -> list[Score]:
    """Return scores: set "a" has four questions, "b" two; full prefill answers 3 and 1 of them right, `reposition` 2
    and 1.
    """
    found = []
    for source, full, own in (("a", (1, 1, 1, 0), (1, 1, 0, 0)), ("b", (1, 0), (0, 1))):
        for number, (right, ours) in enumerate(zip(full, own, strict=True)):
            found.append(score(source, number, "full@", bool(right), 0.0, 1.0))
            found.append(score(source, number, NO_PASSAGES, False, 0.0, 1.0))
            found.append(score(source, number, "reposition@prefix", bool(ours), 0.1 if source == "a" else 0.4, 0.02))
    return [*found, score("a", 0, 'epic{"first_tokens": 4}@', True, 0.3, 0.05)]


def test_rows_are_what_hand_made_scores_come_to():
    figures = figures_of(made())
    rows = {(row["set"], row["method"]): row for row in figures["rows"]}
    assert [name for group, name in rows if group == "all"][:2] == ["full", NO_PASSAGES]
    own = rows["all", "reposition:recipe=prefix"]
    assert (own["questions"], own["sets"]) == (6, 2)
    assert own["accuracy"][0] == pytest.approx((2 / 4 + 1 / 2) / 2)  # sets count alike
    assert own["kl"][0] == pytest.approx((0.1 + 0.4) / 2)
    assert own["relative"][0] == pytest.approx(((2 / 4 + 1 / 2) / 2) / ((3 / 4 + 1 / 2) / 2))
    assert own["f1"][0] == pytest.approx(own["accuracy"][0] / 2)
    assert (own["computed_share"], own["first_token_s"], own["first_token"]) == (0.02, 0.04, 0.02)
    assert rows["a", "reposition:recipe=prefix"]["relative"][0] == pytest.approx(2 / 3, abs=1e-5)
    assert rows["all", "full"]["same_answer"] == (1.0, 1.0, 1.0)
    few = rows["all", "epic:first_tokens=4"]
    assert (few["questions"], few["sets"], few["relative"]) == (1, 1, (1.0, 1.0, 1.0))
    assert figures["prompt_tokens"] == {"a": 101.5, "b": 100.5}
    assert (figures["safe"], figures["surely_safe"]) == ([], []), "too few questions"
    assert any("| `epic:first_tokens=4` | 1 of 8, 1 of 2 sets |" in line for line in table(overall(figures), 4))


def overall(figures: dict[str, list[dict[str, object]]]) -> list[Row]:
    return [Row.from_json(found) for found in figures["rows"] if found["set"] == "all"]


def test_a_method_that_read_some_of_the_sets_alone_is_not_called_safe():
    found = [score("a", n, name, True, 0.0, 0.5) for n in range(20) for name in ("full@", "a3@", "epic@")]
    found += [score("b", n, name, True, 0.0, 0.5) for n in range(20) for name in ("full@", "epic@")]
    assert figures_of(found)["safe"] == figures_of(found)["surely_safe"] == ["epic"]


def test_intervals_hold_their_means_and_draw_within_sets():
    rng = np.random.default_rng(3)
    values = [list(rng.random(40)), list(1000 + rng.random(40))]
    mean, low, high = interval(values)
    assert mean == pytest.approx((fmean(values[0]) + fmean(values[1])) / 2, abs=1e-4)
    half = 1.96 * math.sqrt(np.var(values[0]) / 40 + np.var(values[1]) / 40) / 2
    assert (high - low) / 2 == pytest.approx(half, rel=0.1), "which set a question is of is not drawn"
    assert interval([[1.0, 1.0], [0.0]]) == (0.5, 0.5, 0.5)
    assert ratio([[(1.0, 0.0), (0.0, 0.0)]]) is None
    assert ratio([[(1.0, 1.0), (0.0, 0.0), (1.0, 1.0)]]) == (1.0, 1.0, 1.0)  # in pairs


def row(kl: tuple[float, float, float], relative: tuple[float, float, float], questions: int = 30) -> Row:
    share = (0.5, 0.4, 0.6)
    return Row("all", "epic", questions, 1, share, share, kl, share, relative, 0.1, 1.0, 0.2, 0.1)


def test_a_method_is_safe_within_both_limits_over_enough_questions():
    inside = row((0.2, 0.1, 0.3), (0.95, 0.9, 1.0))
    assert (inside.is_safe, inside.is_surely_safe) == (True, False)
    assert row((0.1, 0.05, 0.2), (1.0, 0.95, 1.05)).is_surely_safe
    assert not row((0.21, 0.1, 0.3), (1.0, 0.99, 1.0)).is_safe
    assert not row((0.1, 0.1, 0.1), (0.94, 0.9, 1.0)).is_safe
    assert not row((0.1, 0.1, 0.1), (1.0, 1.0, 1.0), FEWEST_QUESTIONS - 1).is_safe
    assert not replace(inside, method="full").is_safe
    assert Row.from_json(json.loads(json.dumps(inside.__dict__))) == inside


def test_methods_are_called_as_the_command_line_writes_them():
    specs = every_method()
    assert len({spec.key for spec in specs}) == len(specs)
    assert {spec.name for spec in specs} == set(rc.METHODS)
    for name in rc.METHODS:
        recipes = {spec.recipe or spec.method().recipes[0] for spec in specs if spec.name == name and not spec.options}
        assert recipes == set(rc.METHODS[name]().recipes if name != "full" else recipes)
    given = ["prophet:layers=[2,4]:ratio=0.15", "x=epic:last_tokens=3", "a3:recipe=primer:primer=64:neighbours=2"]
    for spec in [*specs, *parse_methods(given)]:
        (again,) = parse_methods([label(spec.key)])[-1:]
        assert again.key == spec.key


@pytest.mark.slow
def test_the_page_and_the_picture_hold_every_method(arguments, tmp_path):
    found = main("answers", arguments)
    text = (tmp_path / "found.md").read_text(encoding="utf-8")
    assert text == "\n".join(markdown(json.loads((tmp_path / "found.json").read_text()))) + "\n"
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert len(tables) == 3 * (2 + 4)
    assert len({line.count("|") for line in tables}) == 1
    assert "Safe by this table" in text
    figure = plots.draw_answers(found.to_json())
    names = [[one.get_text().strip() for one in ax.texts] for ax in figure.axes]
    assert set(names[0]) == {"reposition", "epic:first_tokens=4"}
    picture = tmp_path / "p.png"
    plots.main([str(tmp_path / "found.json"), str(picture)])
    assert picture.stat().st_size > 10_000


def test_passages_nobody_marked_are_dropped_from_the_end(tiny):
    case = Case("c", "Who?", tuple(CasePassage(f"Text number {n}.") for n in range(4)), ("me",))
    form = short_answers(tiny)
    whole = case.prompt(tiny.tokenizer, form).num_tokens + answers.MAX_ANSWER_TOKENS
    less = fitted(case, tiny, form, whole - 1)
    assert less is not None
    assert less.passages == case.passages[:3]
    assert fitted(case, tiny, form, 10) is None
