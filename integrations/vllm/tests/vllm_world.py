"""A tiny model, its stored blocks, and vLLM over them. Needs an environment with vLLM and ragcache."""

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ragcache.kv.block_key import Recipe, block_key
from ragcache.store.directory import StoreLayout
from ragcache.store.kv_store import KVStore

VOCAB = 512
CHUNKS = (45, 70, 33, 101)
LINKS = [[300 + 50 * chunk + number for number in range(20)] for chunk in range(len(CHUNKS))]
ANSWER = 12
QUIET = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}


class Answered(NamedTuple):
    """ids and log-probabilities of an answer; told: what the connector says of its blocks"""

    ids: list[int]
    logprobs: list[float]
    told: dict[str, Any] | None = None


@dataclass
class Case:
    """A prompt and the tokens that each of its tokens sees (bool [n, n])."""

    ids: list[int]
    layout: Any
    sees: torch.Tensor


class World:
    """A model's directory, its passages, and a store with their blocks."""

    def __init__(self, root: Path, family: str, **config: Any) -> None:
        import ragcache as rc

        self.where = save_model(root / "model", family, **config)
        self.lm = rc.load_lm(self.where)
        numbers = random.Random(3)
        self.prefix, *self.chunks = ([numbers.randrange(3, 290) for _ in range(count)] for count in (7, *CHUNKS))
        self.suffix = [numbers.randrange(3, 290) for _ in range(19)]
        self.layout = StoreLayout(root / "kb")
        self.layout.create()
        with KVStore(self.layout.kv, seal=self.layout.seal()) as kv:
            for ids, block in zip(
                (self.prefix, *self.chunks), self.lm.encode([self.prefix, *self.chunks]), strict=True
            ):
                kv.put(block_key(self.lm.fingerprint, Recipe(), (), ids), block)

    def block_file(self, chunk: int) -> Path:
        return next(self.layout.kv.rglob(block_key(self.lm.fingerprint, Recipe(), (), self.chunks[chunk]) + "*"))

    def case(
        self, order: Sequence[int] = (0, 1, 2, 3), *, links: bool = False, first: int = 0, suffix: Sequence[int] = ()
    ) -> Case:
        """Passages in this order, with link tokens behind each, or the first tokens of each run again."""
        from ragcache.fusion.layout import Span
        from ragcache_vllm.request_layout import RequestLayout

        ids, blocks, runs = list(self.prefix), [Span(0, len(self.prefix))], []
        for rank, chunk in enumerate(order):
            start = len(ids)
            ids += self.chunks[chunk]
            blocks.append(Span(start, len(ids)))
            if first:
                runs.append(Span(start, start + first))
            ids += LINKS[rank] if links else []
        ids += suffix or self.suffix
        sees = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        for block in blocks[1:]:
            sees[block.start : block.stop, : block.start] = False
        return Case(ids, RequestLayout(tuple(blocks), tuple(runs), prefix=len(self.prefix)), sees)

    def oracle(self, case: Case, count: int = ANSWER, *, full: bool = False) -> Answered:
        """transformers' own forward under an explicit mask, token by token, with no cache."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            self.where, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        ids, found, logprobs = list(case.ids), [], []
        for _ in range(count):
            sees = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
            if not full:
                sees[: len(case.ids), : len(case.ids)] &= case.sees
            window = getattr(model.config, "sliding_window", None)
            if window:
                sees &= torch.ones_like(sees).triu(1 - window)
            bias = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)[None, None]
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids]), attention_mask=bias).logits[0, -1]
            scores = torch.log_softmax(logits.float(), -1)
            found.append(int(scores.argmax()))
            logprobs.append(float(scores.max()))
            ids.append(found[-1])
        return Answered(found, logprobs)


def save_model(where: Path, family: str, **config: Any) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    more = {"max_position_embeddings": 8192, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2}
    made = AutoConfig.for_model(family, **sizes, **heads, **more, tie_word_embeddings=False, **config)
    AutoModelForCausalLM.from_config(made, dtype=torch.float32).save_pretrained(where)
    return where


class Engine:
    """vLLM in processes of its own, with the connector."""

    def __init__(self, world: World, load: str = "step", **options: Any) -> None:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        from vllm import LLM
        from vllm.config import KVTransferConfig

        transfer = KVTransferConfig(
            kv_connector="RagCacheConnector",
            kv_role="kv_both",
            kv_connector_module_path="ragcache_vllm.connector",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "store": str(world.layout.root),
                "fingerprint": world.lm.fingerprint,
                "load": load,
            },
        )
        settings = {"enforce_eager": True, "max_model_len": 2048, "max_num_seqs": 8, **options}
        self.llm = LLM(
            str(world.where),
            dtype="float32",
            skip_tokenizer_init=True,
            seed=0,
            kv_transfer_config=transfer,
            disable_hybrid_kv_cache_manager=True,
            worker_cls="ragcache_vllm.worker.RagCacheCPUWorker",
            **settings,
        )

    def ask(self, *prompts: tuple[Case, bool], count: int = ANSWER) -> list[Answered]:
        """Answers to prompts asked at once, each with its layout or, where False, as plain text."""
        from vllm import SamplingParams

        def sampling(case: Case, reuses: bool) -> SamplingParams:
            more = {"kv_transfer_params": case.layout.to_params()} if reuses else None
            return SamplingParams(
                temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, logprobs=1, extra_args=more
            )

        inputs = [{"prompt_token_ids": case.ids} for case, _ in prompts]
        outputs = self.llm.generate(inputs, [sampling(*prompt) for prompt in prompts], use_tqdm=False)
        answers = []
        for output in outputs:
            (made,) = output.outputs
            scores = [scores[id].logprob for scores, id in zip(made.logprobs, made.token_ids, strict=True)]
            told = (output.kv_transfer_params or {}).get("ragcache")
            answers.append(Answered(list(made.token_ids), scores, told))
        return answers

    def close(self) -> None:
        """End vLLM's processes."""
        self.llm.llm_engine.engine_core.shutdown()


def assert_alike(answered: Answered, expected: Answered) -> None:
    """The same tokens, log-probabilities within 1e-4."""
    assert answered.ids == expected.ids
    assert max(abs(a - b) for a, b in zip(answered.logprobs, expected.logprobs, strict=True)) < 1e-4
