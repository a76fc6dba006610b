"""Documents for tests."""

import random

SENTENCE = "The river Alna rises near Osby and ends in the lake of Tolvik."


def text_of(town: str, sentences: int = 5) -> str:
    """A page with its town in every other sentence."""
    return f"# {town}\n\n" + " ".join(f"{town} has mill number {n}. {SENTENCE}" for n in range(sentences)) + "\n"


WORDS = [
    "Tolvik", "river", "Alna", "mill", "the", "of", "was", "founded", "in", "1823", "bridge", "club", "Dr.", "Osby"
]  # fmt: skip


def random_sentence(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 14))) + rng.choice([".", "!", "?", ""])


def random_block(rng: random.Random) -> str:
    kind = rng.randrange(7)
    if kind == 0:
        return "#" * rng.randint(1, 4) + " " + random_sentence(rng)
    if kind == 1:
        return "\n".join("- " + random_sentence(rng) for _ in range(rng.randint(1, 8)))
    if kind == 2:
        return "```\n" + "\n".join("    " * rng.randint(0, 2) + random_sentence(rng) for _ in range(4)) + "\n```"
    if kind == 3:
        return "x" * rng.choice([1, 30, 700])
    return " ".join(random_sentence(rng) for _ in range(rng.randint(1, 12)))


def random_markdown(rng: random.Random) -> str:
    return rng.choice(["\n\n", "\n", "\n\n\n"]).join(random_block(rng) for _ in range(rng.randint(1, 12)))
