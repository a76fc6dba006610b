"""The order in which the mini model learns: copy by match first, then facts in sentences, then whole questions.

Trained on whole questions from the start, such a model learns to name some value of the right kind and stays there.
"""

from __future__ import annotations

import random

from ragcache.training.batches import Stage

STAGES: tuple[Stage, ...] = (
    Stage("copy", "copy", (0, 0), batch_size=16, num_questions=12, threshold=0.7),
    Stage("pairs", "pairs", (3, 8), batch_size=10, num_questions=10, threshold=0.9),
    Stage("one relation", "registry", (2, 4), 10, 8, threshold=0.85, relations=("town",)),
    Stage("one hop, few passages", "registry", (2, 4), 8, 12, threshold=0.85),
    Stage("two hops, few passages", "registry", (3, 6), 6, 12, threshold=0.85, two_hop_share=0.5),
    Stage("eight passages", "registry", (4, 8), 6, 12, threshold=0.93, two_hop_share=0.5),
    Stage("many passages", "registry", (6, 12), 4, 14, threshold=0.96, two_hop_share=0.5),
    Stage("all lengths", "registry", (2, 16), 4, 14, threshold=2.0, two_hop_share=0.5),
)
EARLIER_SHARE = 0.35
EARLIER_DECAY = 0.5


def draw_stage(rng: random.Random, current: int) -> int:
    """Choose the stage of one batch: mostly the current one, else an earlier one, the nearer the likelier."""
    if current == 0 or rng.random() > EARLIER_SHARE:
        return current
    earlier = range(current)
    return rng.choices(earlier, [EARLIER_DECAY ** (current - stage) for stage in earlier])[0]
