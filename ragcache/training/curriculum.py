"""The order in which the mini model learns: copy by match first, then facts in sentences, then whole questions.

Trained on whole questions from the start, such a model learns to name some value of the right kind and stays there.
"""

from __future__ import annotations

import random

from ragcache.training.batches import Stage

STAGES: tuple[Stage, ...] = (
    Stage("copy", "copy", (0, 0), batch_size=16, num_questions=12, threshold=0.7),
    Stage("pairs", "pairs", (3, 8), batch_size=10, num_questions=10, threshold=0.45),
    Stage("one relation", "registry", (2, 4), batch_size=10, num_questions=8, threshold=0.7, relations=("town",)),
    Stage("one hop", "registry", (2, 4), batch_size=8, num_questions=12, threshold=0.7),
    Stage("two hops", "registry", (3, 6), batch_size=6, num_questions=12, threshold=0.75, two_hop_share=0.5),
    Stage("more passages", "registry", (4, 10), batch_size=5, num_questions=12, threshold=0.92, two_hop_share=0.5),
    Stage("all lengths", "registry", (2, 16), batch_size=4, num_questions=14, threshold=2.0, two_hop_share=0.5),
)
EARLIER_SHARE = 0.35
EARLIER_DECAY = 0.5


def draw_stage(rng: random.Random, current: int) -> int:
    """Choose the stage of one batch: mostly the current one, else an earlier one, the nearer the likelier."""
    if current == 0 or rng.random() > EARLIER_SHARE:
        return current
    earlier = range(current)
    return rng.choices(earlier, [EARLIER_DECAY ** (current - stage) for stage in earlier])[0]
