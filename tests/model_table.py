"""The table of every family in docs/models.md: `PYTHONPATH=tests python tests/model_table.py` tries and writes it.

A family is exact where law 1 holds for it by every recipe (`outcome` says so, or fails). What is refused is listed by
its reason.
"""

import re
import tempfile
import warnings
from collections import defaultdict
from pathlib import Path

import transformers
from causal_families import CAUSAL_FAMILIES, IMAGE_FAMILIES, UNBUILT, causal_model
from families import assert_same, block_diagonal, logits_under, random_prompt
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import ragcache as rc

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- families: written by tests/model_table.py -->", "<!-- end of families -->"
EVERY = sorted({*CAUSAL_FAMILIES, *IMAGE_FAMILIES})
LEAST_EFFECT = 1e-3  # of the mask on the logits, to be seen beside rounding
EXACT, LATENT = "exact", "exact; blocks hold latents"
RECURRENT = "exact; recurrent layers, whose blocks hold maps of states"


def outcome(name: str, directory: Path) -> str:
    """What a family's row says. Raises AssertionError where it is neither refused nor exact by every recipe."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a family's own code
        causal_model(name).save_pretrained(directory)
    try:
        lm = rc.load_lm(directory)
    except rc.UnsupportedModelError as error:
        return "refused: " + str(error).split("is not supported: ", 1)[1]
    kind = AutoModelForImageTextToText if name in IMAGE_FAMILIES else AutoModelForCausalLM
    oracle = kind.from_pretrained(directory, dtype="float32", attn_implementation="eager").eval()
    prompt = random_prompt(1, prefix=6, chunks=(7, 13, 4))
    joined = logits_under(oracle, prompt.ids)
    assert_same(rc.fuse(lm, prompt, method="full").next_logits, joined)
    if not lm.shape.states:  # no mask keeps a state out: law 14 is in test_hybrids
        apart = logits_under(oracle, prompt.ids, block_diagonal(prompt))
        assert (apart - joined).abs().max() > LEAST_EFFECT * joined.abs().max(), (
            "this model cannot tell the masks apart"
        )
        isolated = rc.encode(lm, prompt, recipe="isolated")
        assert_same(rc.fuse(lm, prompt, method="reposition", blocks=isolated).next_logits, apart)
    for chunk, block in zip(prompt.chunk_ids, rc.encode(lm, prompt, recipe="prefix"), strict=True):
        alone = rc.Prompt(prompt.prefix_ids, [chunk], prompt.suffix_ids)
        fused = rc.fuse(lm, alone, method="reposition", blocks=[block], recipe="prefix")
        assert_same(fused.next_logits, logits_under(oracle, alone.ids))
    return RECURRENT if lm.shape.states else LATENT if lm.shape.latent else EXACT


def row_of(name: str, found: str) -> str:
    """The row that a family is listed in: no layer and no foreign error tells two of one kind apart."""
    if name in IMAGE_FAMILIES and found.startswith("exact"):
        return f"{found}, by its text part: it reads images too"
    reason = re.sub(r" \([^()]*(\([^()]*\)[^()]*)*\)", "", found).partition(" or a pattern")[0]
    return re.sub(r"layer \d+", "a layer", reason)


def table(outcomes: dict[str, str]) -> str:
    rows: dict[str, list[str]] = defaultdict(list)
    for name, found in outcomes.items():
        rows[row_of(name, found)].append(name)
    lines = ["| what works | families |", "|---|---|"]
    for what in sorted(rows, key=lambda row: (row.startswith("not tried"), row.startswith("refused"), row)):
        lines.append(f"| {what} | {', '.join(f'`{name}`' for name in sorted(rows[what]))} |")
    return "\n".join(lines)


def written() -> dict[str, str]:
    """What the page says of each family."""
    text = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    rows = (line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ") and "`" in line)
    return {name: what for what, names in rows for name in re.findall(r"`([^`]+)`", names)}


def sweep() -> dict[str, str]:
    outcomes = {}
    for name in EVERY:
        if name in UNBUILT:
            outcomes[name] = "not tried: no small model of it can be made here"
            continue
        with tempfile.TemporaryDirectory() as directory:
            outcomes[name] = outcome(name, Path(directory))
        print(name, outcomes[name], flush=True)
    return outcomes


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(sweep())}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
