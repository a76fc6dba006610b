"""The order in which the mini model learns: to copy by match, to find a fact by a name, then whole questions.

If it is trained on whole questions from the start, such a model learns to name any value of the right kind, and does
not improve from there. So each stage is a small step from the stage before, and in contexts of entities of the same
kind (`batches.ALIKE`) only the name tells which value is right.
"""

from __future__ import annotations

import random

from tools.mini.batches import Stage

STAGES: tuple[Stage, ...] = (
    Stage("copy", "copy", (0, 0), batch_size=16, num_questions=12, threshold=0.6),
    Stage("sentences", "sentences", (3, 8), batch_size=16, num_questions=12, threshold=0.75),
    Stage("completions", "completions", (2, 5), batch_size=8, num_questions=12, threshold=0.75),
    Stage("one hop", "questions", (2, 5), batch_size=7, num_questions=10, threshold=0.8),
    Stage("two hops", "questions", (3, 8), 5, 10, threshold=0.85, rate=0.7, two_hop_share=0.5),
    Stage("all lengths", "questions", (2, 16), 4, 12, threshold=2.0, rate=0.6, two_hop_share=0.5),
)
EARLIER_SHARE = 0.35
EARLIER_DECAY = 0.5


def draw_stage(rng: random.Random, current: int) -> int:
    """Return the stage of a batch: mostly the current stage, or else an earlier one, more likely a recent one."""
    if current == 0 or rng.random() > EARLIER_SHARE:
        return current
    earlier = range(current)
    return rng.choices(earlier, [EARLIER_DECAY ** (current - stage) for stage in earlier])[0]
