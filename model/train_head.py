"""A DFlash head while it is trained: the pass over many anchors, the loss, where it starts, how it is saved.

A decoder drafts one block at a time from a cache that holds the context. Training has whole answers, and every
position of one is an anchor where a block may begin: here the context's keys and values are computed once for all of
them, and each block sees the context before its own root, and itself. Per anchor that is what DraftHead computes.

Symbols: B sequences, A anchors of each (no accepted nodes), L block depth, S = L + 1 rows of a block, T positions,
F = taps·H, G query heads to a key head, K labels kept, V' rows of the LM head that the loss runs over.

Which anchors are taken, and what they are labelled with, is model/train_data.py.
"""

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from model.config import ROPE_KEYS, DraftConfig, Rope, check_pair
from model.dflash import DraftHead
from model.errors import UsageError
from model.files import save_tensors, write_atomically
from model.hub import FREQUENT_TOKENS
from model.load import load_draft
from model.transformer import Attention, Target, rotate
from model.weights import destinations


def block_states(draft: DraftHead, target: Target, features: Tensor, roots: Tensor, anchors: Tensor) -> Tensor:
    """What DraftHead.forward gives for A prefixes of each of B sequences, in one pass.

    features (B, T, F) of the sequences; roots (B, A) token ids at positions anchors (B, A). Block (b, a) sees
    features[b, :anchors[b, a]] and itself. -> normed hidden states (B, A, L, H) of the mask rows.
    """
    (batch, length, _), count, size = features.shape, anchors.shape[1], draft.block_size
    blocks = roots.new_full((batch, count, size), draft.mask_token_id)
    blocks[..., 0] = roots
    x = target.embed(blocks.flatten(1))
    places = torch.arange(length, device=anchors.device)
    positions = anchors[..., None] + torch.arange(size, device=anchors.device)
    context_rope = draft.rotary(places, x.dtype)
    block_rope = [part.unflatten(0, (batch, 1, -1)) for part in draft.rotary(positions.flatten(), x.dtype)]
    hidden_from = torch.where(places < anchors[..., None], 0.0, -torch.inf).to(x.dtype)  # (B, A, T)
    context = draft.hidden_norm(draft.fc(features.to(x.dtype)))
    for layer in draft.layers:
        attention = layer.self_attn
        q, k, v = attention.project(layer.input_layernorm(x), block_rope)
        seen = context_keys(attention, context, context_rope)
        x = x + attention.o_proj(block_attention(q, k, v, *seen, hidden_from))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return draft.norm(x).unflatten(1, (count, size))[:, :, 1:]


def context_keys(attention: Attention, context: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values (B, Hkv, T, D) of context (B, T, H). No row of the context asks, so queries are left out."""
    skip = attention.heads * attention.head_dim
    bias = attention.qkv_proj.bias
    heads = F.linear(context, attention.qkv_proj.weight[skip:], None if bias is None else bias[skip:])
    k, v = heads.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2).chunk(2, dim=1)
    return rotate(attention.k_norm(k), *rope), v


def block_attention(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """Attention of A blocks over their context and themselves, in two parts under one softmax.

    q (B, Hq, A·S, D) and k, v (B, Hkv, A·S, D) of the blocks; keys, values (B, Hkv, T, D) of the context; bias
    (B, A, T) is 0 where a block sees the context and -inf elsewhere. -> (B, A·S, Hq·D).
    """
    batch, kv_heads, length, dim = keys.shape
    count = bias.shape[1]
    q = q.unflatten(1, (kv_heads, -1)).unflatten(3, (count, -1)) * dim**-0.5  # (B, Hkv, G, A, S, D)
    k, v = (part.unflatten(2, (count, -1))[:, :, None] for part in (k, v))  # (B, Hkv, 1, A, S, D)
    flat = q.flatten(2, 4)  # (B, Hkv, G·A·S, D)
    over_context = (flat @ keys.transpose(-1, -2)).unflatten(2, q.shape[2:5]) + bias[:, None, None, :, None]
    over_block = q @ k.transpose(-1, -2)
    shares = torch.cat((over_context, over_block), -1).softmax(-1).to(v.dtype)
    out = (shares[..., :length].flatten(2, 4) @ values).view(q.shape) + shares[..., length:] @ v
    return out.flatten(1, 2).flatten(2, 3).transpose(1, 2).flatten(2)


class SoftCrossEntropy(torch.autograd.Function):
    """Weighted cross-entropy of M rows against soft labels, through a frozen LM head.

    The gradient needs the softmax and nothing else, so it is formed in the forward pass and the logits are dropped.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, head: Tensor, labels: Tensor, shares: Tensor, weights: Tensor):
        """hidden (M, H), head (V', H); labels (M, K) rows of the head with shares (M, K) that sum to 1; weights (M,).

        -> the weighted sum of losses, and the top-1 rows (M,).
        """
        logits = (hidden @ head.T).float()
        highest, top = logits.max(-1)
        chosen = logits.gather(-1, labels)
        error = logits.sub_(highest[:, None]).exp_()
        total = error.sum(-1)
        loss = (weights[:, None] * shares * ((highest + total.log())[:, None] - chosen)).sum()
        error.mul_((weights / total)[:, None]).scatter_add_(-1, labels, -shares * weights[:, None])
        ctx.save_for_backward(error.to(head.dtype) @ head)
        ctx.mark_non_differentiable(top)
        return loss, top

    @staticmethod
    def backward(ctx, gradient: Tensor, _):
        return gradient * ctx.saved_tensors[0], None, None, None, None


def head_config(target: Target, layers: int, block_size: int, taps: Sequence[int] = ()) -> DraftConfig:
    """A head of the target's own dimensions. Without `taps` it reads five layers, evenly from the second to the third
    last. Its mask token is yet to be chosen."""
    config = target.config
    taps = taps or sorted({max(0, round(1 + part * (config.layers - 4) / 4)) for part in range(5)})
    if layers > config.layers:
        raise UsageError(f"--layers {layers}: they begin as the target's own, and it has {config.layers}")
    if max(taps) >= config.layers:
        raise UsageError(f"--taps {max(taps)}: the target's layers are 0 to {config.layers - 1}")
    return DraftConfig(
        vocab_size=config.vocab_size,
        hidden=config.hidden,
        intermediate=config.intermediate,
        layers=layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        eps=config.eps,
        rope=Rope(config.rope.theta),  # plain: a head drafts without the target's stretched context
        context=config.context,
        qk_norm=True,
        block_size=block_size,
        taps=tuple(taps),
        mask_token_id=0,
        target_layers=config.layers,
    )


def fresh_head(config: DraftConfig, target: Target) -> DraftHead:
    """A head whose layers are the target's last ones; the target must not be packed yet.

    `fc` passes the last tap on, and `hidden_norm` is the norm that the first of these layers had before its keys:
    so the first step already reads a sensible context.
    """
    draft = DraftHead(config).to(target.device)
    for name, parameter in draft.named_parameters():
        torch.nn.init.ones_(parameter) if "norm" in name else torch.nn.init.normal_(parameter, std=0.02)
    sources = target.layers[-config.layers :]
    for layer, source in zip(draft.layers, sources):
        own = layer.state_dict()
        layer.load_state_dict(own | {name: value for name, value in source.state_dict().items() if name in own})
    with torch.no_grad():
        draft.fc.weight.mul_(0.1)[:, -config.hidden :] += torch.eye(config.hidden, device=target.device)
        draft.hidden_norm.weight.copy_(sources[0].input_layernorm.weight)
        draft.norm.weight.copy_(target.norm.weight)
    return draft


def loaded_head(name: str, target: Target) -> DraftHead:
    """An existing head, in float32, to go on from."""
    draft = load_draft(name, torch.float32, target.device, pack=False)
    check_pair(draft.config, target.config)
    return draft


def rope_scaling(rope: Rope) -> dict | None:
    """What config.json holds of a stretched context, which a head to go on from may have."""
    values = {entry.metadata.get("name", entry.name): getattr(rope, entry.name) for entry in fields(rope)}
    settings = {name: values[name] for name in ROPE_KEYS[rope.kind]}
    return {"rope_type": rope.kind, **settings} if settings else None


def save_head(draft: DraftHead, directory: str | Path, frequent: list[int]) -> None:
    """Write config.json and model.safetensors (bfloat16) as published heads have them.

    Beside them go the token ids of the answers, the most frequent first: what `DraftHead.restrict` can be given.
    """
    directory, config = Path(directory), draft.config
    directory.mkdir(parents=True, exist_ok=True)
    rows = {name: destination.rows() for name, destination in destinations(draft).items()}
    tensors = {name: value.bfloat16().contiguous() for name, value in rows.items()}
    save_tensors(directory / "model.safetensors", tensors, {"format": "pt"})
    values = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": config.attention_bias,
        "block_size": config.block_size,
        "dflash_config": {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.taps)},
        "dtype": "bfloat16",
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "layer_types": ["full_attention"] * config.layers,
        "max_position_embeddings": config.context,
        "mlp_bias": config.mlp_bias,
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.kv_heads,
        "num_target_layers": config.target_layers,
        "rms_norm_eps": config.eps,
        "rope_scaling": rope_scaling(config.rope),
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": True,
        "vocab_size": config.vocab_size,
    }
    write_atomically(directory / "config.json", json.dumps(values, indent=1) + "\n")
    write_atomically(directory / FREQUENT_TOKENS, json.dumps({"tokens": frequent}) + "\n")
