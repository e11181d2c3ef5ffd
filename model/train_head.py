"""A DFlash head in training: the pass over many anchors, the loss, the weights it starts from, and how it is saved.

A decoder drafts one block at a time, from a cache that holds the context. Training has whole answers, and a block may
begin at every position of an answer: its anchor. Here the context's keys and values are computed once for all anchors,
and each block sees itself and the context before its own root. For each anchor, DraftHead computes the same.

Symbols: B sequences, L block depth, T positions, H hidden size, D head dimension, Hq and Hkv query and key/value heads,
F = taps·H, V' rows of the LM head that the loss runs over. In shapes, `block` is L + 1, the rows of a block, and
`anchors` the number of them in each sequence.

model/train_data.py chooses the anchors and their labels.
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
    """What DraftHead.forward gives for many prefixes of each of B sequences, in one pass.

    features (B, T, F) of the sequences; roots (B, anchors) token ids at the positions `anchors` (B, anchors). Block a
    of sequence b sees features[b, :anchors[b, a]] and itself. -> normed hidden states (B, anchors, L, H) of the mask
    rows.
    """
    (batch, length, _), count, size = features.shape, anchors.shape[1], draft.block_size
    blocks = roots.new_full((batch, count, size), draft.mask_token_id)
    blocks[..., 0] = roots
    x = target.embed(blocks.flatten(1))  # (B, anchors · block, H)
    positions = torch.arange(length, device=anchors.device)
    block_positions = anchors[..., None] + torch.arange(size, device=anchors.device)  # (B, anchors, block)
    context_rope = draft.rotary(positions, x.dtype)
    block_rope = [part.unflatten(0, (batch, 1, -1)) for part in draft.rotary(block_positions.flatten(), x.dtype)]
    unseen = torch.where(positions < anchors[..., None], 0.0, -torch.inf).to(x.dtype)  # (B, anchors, T)
    context = draft.hidden_norm(draft.fc(features.to(x.dtype)))  # (B, T, H)
    for layer in draft.layers:
        attention = layer.self_attn
        q, k, v = attention.project(layer.input_layernorm(x), block_rope)
        seen = context_keys(attention, context, context_rope)
        x = x + attention.o_proj(block_attention(q, k, v, *seen, unseen))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return draft.norm(x).unflatten(1, (count, size))[:, :, 1:]


def context_keys(attention: Attention, context: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values, each (B, Hkv, T, D), of context (B, T, H); rope: cos and signed sin, each (T, D).

    The context attends to nothing, so no queries are computed.
    """
    skip = attention.heads * attention.head_dim
    bias = attention.qkv_proj.bias
    heads = F.linear(context, attention.qkv_proj.weight[skip:], None if bias is None else bias[skip:])
    k, v = heads.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2).chunk(2, dim=1)
    return rotate(attention.k_norm(k), *rope), v


def block_attention(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """Attention of the blocks over their context and themselves, in two parts under one softmax.

    q (B, Hq, anchors · block, D) and k, v (B, Hkv, anchors · block, D) of the blocks; keys, values (B, Hkv, T, D) of
    the context; bias (B, anchors, T), 0 where a block sees the context and -inf elsewhere
    -> (B, anchors · block, Hq·D).
    """
    _, kv_heads, length, dim = keys.shape
    count = bias.shape[1]
    q = q.unflatten(1, (kv_heads, -1)).unflatten(3, (count, -1)) * dim**-0.5  # (B, Hkv, Hq/Hkv, anchors, block, D)
    k, v = (part.unflatten(2, (count, -1))[:, :, None] for part in (k, v))  # (B, Hkv, 1, anchors, block, D)
    flat = q.flatten(2, 4)  # (B, Hkv, Hq/Hkv · anchors · block, D)
    over_context = (flat @ keys.transpose(-1, -2)).unflatten(2, q.shape[2:5]) + bias[:, None, None, :, None]
    over_block = q @ k.transpose(-1, -2)
    shares = torch.cat((over_context, over_block), -1).softmax(-1).to(v.dtype)
    out = (shares[..., :length].flatten(2, 4) @ values).view(q.shape) + shares[..., length:] @ v
    return out.flatten(1, 2).flatten(2, 3).transpose(1, 2).flatten(2)


class SoftCrossEntropy(torch.autograd.Function):
    """Weighted cross-entropy against soft labels, through a frozen LM head.

    The gradient needs only the softmax, so it is formed in the forward pass and the logits are not kept.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, head: Tensor, labels: Tensor, shares: Tensor, weights: Tensor):
        """The weighted sum of losses (), and the top-1 row of the head (rows,) for each hidden state.

        hidden (rows, H); head (V', H); labels (rows, labels), rows of the head; shares (rows, labels) of each label,
        which sum to 1; weights (rows,)
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
        """gradient () of the loss -> that of `hidden` (rows, H); the other arguments have none."""
        return gradient * ctx.saved_tensors[0], None, None, None, None


def head_config(target: Target, layers: int, block_size: int, taps: Sequence[int] = ()) -> DraftConfig:
    """A head of the target's own dimensions, whose mask token is not chosen yet.

    Without `taps` it reads five layers, evenly spaced from the second to the third last. UsageError for more layers
    than the target has, and for a tap that is not one of its layers.
    """
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
    """A head whose layers are copies of the target's last ones; the target must not be packed yet.

    `fc` passes the last tap on, and `hidden_norm` is the input norm of the first of these layers, so that even the
    first step reads a sensible context.
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
    """An existing head, in float32, to train further. Raises as `load_draft` does, and as `check_pair`."""
    draft = load_draft(name, torch.float32, target.device, pack=False)
    check_pair(draft.config, target.config)
    return draft


def rope_scaling(rope: Rope) -> dict | None:
    """config.json's `rope_scaling`, None without a stretched context. Only a head given by --init may have one."""
    values = {entry.metadata.get("name", entry.name): getattr(rope, entry.name) for entry in fields(rope)}
    settings = {name: values[name] for name in ROPE_KEYS[rope.kind]}
    return {"rope_type": rope.kind, **settings} if settings else None


def save_head(draft: DraftHead, directory: str | Path, frequent: list[int]) -> None:
    """Write config.json and model.safetensors (bfloat16) in the form of published heads.

    `frequent`, the token ids of the answers with the most frequent first, is written beside them: `DraftHead.restrict`
    can be given its beginning.
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
