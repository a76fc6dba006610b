"""Tiny random models with recurrent layers, and the oracle they are checked against: one pass, stepped token by token.

The oracle shares nothing with what it checks. Attention is the model's own under one mask. Recurrent layers are plain
loops over the papers' equations (gated delta rule, arXiv 2412.06464, eq. 10; Mamba-2, arXiv 2405.21060, eq. 16): each
token of a part reads a state that began at zero where its part began, and its convolution sees that part alone; beside
that one state takes every token in the order of the prompt, and the last part reads it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from tiny_model import byte_tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 258
KINDS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 1024,
    "pad_token_id": None,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA = {  # columns fewer than rows, and more
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "layer_types": KINDS,
}
WIDE = {**DELTA, "linear_key_head_dim": 8, "linear_value_head_dim": 12}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 16}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
GRANITE = {
    **MAMBA,
    "layer_types": KINDS,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 16,
}
NEMOTRON = {
    "head_dim": 8,
    "ssm_state_size": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "chunk_size": 16,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
}
KIMI = {  # latent attention beside layers that forget by channel
    "layer_types": KINDS,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 2,
}
STEPPED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", {**DELTA, **EXPERTS, "head_dim": 16, "shared_expert_intermediate_size": 16}),
    "qwen3_5": ("qwen3_5_text", {**WIDE, "head_dim": 16, "rope_parameters": PARTIAL}),
    "granite": ("granitemoehybrid", {**GRANITE, "position_embedding_type": "rope"}),
    "granite-nope": ("granitemoehybrid", {**GRANITE, "position_embedding_type": None}),
    "bamba": ("bamba", {**MAMBA, "attn_layer_indices": [2]}),
    "nemotron_h": ("nemotron_h", NEMOTRON),
    "kimi_linear": ("kimi_linear", KIMI),
}
"""Those that the oracle steps."""
HYBRIDS = {
    **STEPPED,
    "olmo_hybrid": ("olmo_hybrid", WIDE),
    "falcon_h1": ("falcon_h1", {**MAMBA, "mamba_d_ssm": 64, "mamba_norm_before_gate": False, "num_hidden_layers": 3}),
    "lfm2": ("lfm2", {"conv_L_cache": 3, "layer_types": ["conv", "conv", "full_attention", "conv"]}),
}
ONE_EACH = ("qwen3_next", "bamba", "lfm2", "kimi_linear", "falcon_h1")
"""One of each kind of recurrent layer, and one with such a layer beside attention."""
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "jamba": (
        "jamba",
        {"attn_layer_period": 4, "attn_layer_offset": 2, "mamba_d_state": 8, "mamba_dt_rank": 4, "num_experts": 2},
        "without the state that enters them",
    ),
    "zamba2": (
        "zamba2",
        {
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
            "n_mamba_heads": 4,
            "mamba_d_state": 8,
            "mamba_ngroups": 2,
            "num_mem_blocks": 1,
            "adapter_rank": 4,
        },
        "share one attention",
    ),
    "time step": (
        "bamba",
        {**MAMBA, "attn_layer_indices": [2], "time_step_limit": (0.0, 0.1)},
        "recurrent layer 0 limits its time step",
    ),
}


def build(kind: str, sizes: dict[str, Any]) -> PreTrainedModel:
    """Weights under which layers remember: by default they forget a token within two, and P would not matter."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**SIZES, **sizes}), attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            if name.endswith("A_log"):
                weight.copy_(torch.log(0.002 + 0.05 * torch.rand(weight.shape, generator=generator)))
            elif name.endswith("dt_bias") or "embed" in name:
                weight.copy_(drawn)
            elif weight.dim() > 1:
                weight.copy_(0.6 * drawn if "conv" in name else drawn * weight.shape[-1] ** -0.5)
    return model.float().eval()


def hybrid(name: str) -> PreTrainedModel:
    return build(*HYBRIDS[name])


def save_hybrid(name: str, directory: Path) -> Path:
    hybrid(name).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


Step = Callable[[Tensor, int], Tensor]


@torch.no_grad()
def stepped_logits(model: PreTrainedModel, parts: list[list[int]]) -> Tensor:
    """Logits of the last part's tokens, [num_tokens, vocab_size], where every part before it is read alone."""
    ids = [id for part in parts for id in part]
    ends = torch.tensor([len(part) for part in parts]).cumsum(0).tolist()
    spans = [(end - len(part), end) for end, part in zip(ends, parts, strict=True)]
    see = torch.zeros(len(ids), len(ids), dtype=torch.bool)
    for start, end in spans:
        see[start:end, start:end] = torch.ones(end - start, end - start).tril().bool()
    start = spans[-1][0]
    see[start:, :start] = True
    mask = torch.zeros(see.shape).masked_fill(~see, torch.finfo(torch.float32).min)[None, None]
    changed = []
    for module in model.modules():
        step = (
            _kimi
            if hasattr(module, "forget_gate")
            else _delta
            if "GatedDeltaNet" in type(module).__name__
            else _mamba
            if hasattr(module, "ssm_state_size")
            else None
        )
        if step is not None:
            module.forward = step(module, spans)  # type: ignore[assignment]
            changed.append(module)
    try:
        where = torch.arange(len(ids))[None]
        out = model(input_ids=torch.tensor([ids]), attention_mask=mask, position_ids=where, use_cache=False)
    finally:
        for module in changed:
            del module.forward
    logits: Tensor = out.logits[0, start:]
    return logits


def _convolved(x: Tensor, conv: nn.Module, spans: list[tuple[int, int]]) -> Tensor:
    """x: [num_tokens, channels]; the last part sees everything before it."""
    weight: Any = conv.weight[:, 0]  # type: ignore[index]
    out, width = torch.empty_like(x), weight.shape[-1]
    for start, end in spans:
        first = 0 if (start, end) == spans[-1] else start
        for at in range(start, end):
            seen = list(range(first, at + 1))[-width:]
            out[at] = (x[seen] * weight[:, width - len(seen) :].T).sum(0) + (0 if conv.bias is None else conv.bias)
    return F.silu(out)


def _scanned(step: Step, read: Step, zero: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    outs, whole = [], zero.clone()
    for start, end in spans:
        own = whole if (start, end) == spans[-1] else zero.clone()
        for at in range(start, end):
            whole, own = step(whole, at), step(own, at)
            outs.append(read(own, at))
    return torch.stack(outs)


def _delta(layer: Any, spans: list[tuple[int, int]]) -> Callable[..., Tensor]:
    keys, values, dk, dv = layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim

    def forward(hidden_states: Tensor, **_: Any) -> Tensor:
        x = hidden_states[0]
        count, ratio = x.shape[0], values // keys
        if hasattr(layer, "in_proj_qkvz"):  # one key head's share of everything side by side
            shares = layer.in_proj_qkvz(x).view(count, keys, -1).split([dk, dk, ratio * dv, ratio * dv], -1)
            q, k, v, z = (share.reshape(count, -1) for share in shares)
            b, a = (one.reshape(count, values) for one in layer.in_proj_ba(x).view(count, keys, -1).chunk(2, -1))
            mixed = torch.cat([q, k, v], -1)
        else:
            mixed, z, b, a = layer.in_proj_qkv(x), layer.in_proj_z(x), layer.in_proj_b(x), layer.in_proj_a(x)
        q, k, v = _convolved(mixed, layer.conv1d, spans).split([keys * dk, keys * dk, values * dv], -1)
        q, k = (
            (
                u.view(count, keys, dk) / (u.view(count, keys, dk).square().sum(-1, keepdim=True) + 1e-6).sqrt()
            ).repeat_interleave(ratio, 1)
            for u in (q, k)
        )
        v, beta, q = v.view(count, values, dv), b.sigmoid(), q * dk**-0.5
        alpha = (-layer.A_log.exp() * F.softplus(a + layer.dt_bias)).exp()

        def step(state: Tensor, at: int) -> Tensor:
            state = alpha[at][:, None, None] * state
            error = v[at] - torch.einsum("hk,hkv->hv", k[at], state)
            return state + torch.einsum("h,hk,hv->hkv", beta[at], k[at], error)

        out = _scanned(step, lambda s, at: torch.einsum("hk,hkv->hv", q[at], s), torch.zeros(values, dk, dv), spans)
        normed = layer.norm(out.reshape(-1, dv), z.reshape(-1, dv))
        return layer.out_proj(normed.reshape(1, count, -1))

    return forward


def _kimi(layer: Any, spans: list[tuple[int, int]]) -> Callable[..., Tensor]:
    """Kimi delta attention (arXiv 2510.26692): the gated delta rule with a decay for each row of the state."""
    heads, width = layer.num_heads, layer.head_dim

    def forward(hidden_states: Tensor, **_: Any) -> Tensor:
        x = hidden_states[0]
        mixed = torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], -1)
        q, k, v = (one.view(-1, heads, width) for one in _convolved(mixed, layer.conv1d, spans).chunk(3, -1))
        q, k = (u / (u.square().sum(-1, keepdim=True) + 1e-6).sqrt() for u in (q, k))
        q, beta, gate = q * width**-0.5, layer.b_proj(x).sigmoid(), layer.forget_gate
        kept = F.softplus((gate.f_b_proj(gate.f_a_proj(x)) + gate.dt_bias).view(-1, heads, width))
        alpha = (-gate.A_log.view(1, heads, 1).exp() * kept).exp()

        def step(state: Tensor, at: int) -> Tensor:
            state = alpha[at][:, :, None] * state
            error = v[at] - torch.einsum("hk,hkv->hv", k[at], state)
            return state + torch.einsum("h,hk,hv->hkv", beta[at], k[at], error)

        zero = torch.zeros(heads, width, width)
        out = _scanned(step, lambda s, at: torch.einsum("hk,hkv->hv", q[at], s), zero, spans)
        output = layer.g_b_proj(layer.g_a_proj(x)).view(-1, heads, width)
        return layer.o_proj(layer.o_norm(out[None], output[None]).reshape(1, len(x), -1))

    return forward


def _mamba(layer: Any, spans: list[tuple[int, int]]) -> Callable[..., Tensor]:
    heads, width, rows, groups = layer.num_heads, layer.head_dim, layer.ssm_state_size, layer.n_groups

    def forward(hidden_states: Tensor, **_: Any) -> Tensor:
        x = hidden_states[0]
        inner, shared = heads * width, groups * rows
        gate, mixed, dt = layer.in_proj(x).split([inner, inner + 2 * shared, heads], -1)
        v, b, c = _convolved(mixed, layer.conv1d, spans).split([inner, shared, shared], -1)
        v = v.view(-1, heads, width)
        b, c = (one.view(-1, groups, rows).repeat_interleave(heads // groups, 1) for one in (b, c))
        dt = F.softplus(dt + layer.dt_bias).clamp(*layer.time_step_limit)
        decay = (-layer.A_log.exp() * dt).exp()

        def step(state: Tensor, at: int) -> Tensor:
            return decay[at][:, None, None] * state + torch.einsum("h,hp,hn->hpn", dt[at], v[at], b[at])

        def read(state: Tensor, at: int) -> Tensor:
            return torch.einsum("hpn,hn->hp", state, c[at]) + layer.D[:, None] * v[at]

        out = _scanned(step, read, torch.zeros(heads, width, rows), spans).reshape(1, -1, inner)
        return layer.out_proj(layer.norm(out, gate[None]))

    return forward
