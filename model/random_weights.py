"""Targets and DFlash heads of published shapes with random weights, made on the device that they will run on.

Latency depends only on shapes, so it can be measured without a checkpoint. Text and acceptance cannot: a figure
measured with such a model must say so.
"""

from dataclasses import dataclass

import torch
from torch import nn

from model.config import DraftConfig, Rope, TargetConfig
from model.dflash import DraftHead
from model.errors import UsageError
from model.linear import linear_layers
from model.memory import require_memory
from model.transformer import RMSNorm, Target

SPREAD = 0.02  # standard deviation of the weights, as is usual at initialisation


@dataclass(frozen=True)
class Shape:
    """The configurations of a target and its head."""

    target: TargetConfig
    draft: DraftConfig


def _shape(target: dict, draft: dict, shared: dict) -> Shape:
    """A `Shape` from the fields of the target alone, of the head alone, and of both."""
    head = dict(head_dim=shared["head_dim"], eps=1e-6, rope=Rope(1e6), qk_norm=True) | shared | draft
    return Shape(TargetConfig(**shared | target), DraftConfig(**head, target_layers=target["layers"]))


SHAPES = {
    "qwen3-8b": _shape(
        dict(intermediate=12288, layers=36, eps=1e-6, rope=Rope(1e6), qk_norm=True, family="qwen3",
             tied=False),
        dict(intermediate=12288, layers=5, block_size=16, taps=(1, 9, 17, 25, 33), mask_token_id=151669),
        dict(vocab_size=151936, hidden=4096, heads=32, kv_heads=8, head_dim=128, context=40960),
    ),
    "qwen3-4b": _shape(
        dict(intermediate=9728, layers=36, eps=1e-6, rope=Rope(1e6), qk_norm=True, family="qwen3", tied=True),
        dict(intermediate=9728, layers=5, block_size=16, taps=(1, 9, 17, 25, 33), mask_token_id=151669),
        dict(vocab_size=151936, hidden=2560, heads=32, kv_heads=8, head_dim=128, context=40960),
    ),
    "llama3.1-8b": _shape(
        dict(intermediate=14336, layers=32, eps=1e-5, rope=Rope(5e5, "llama3", 8.0, original_context=8192),
             family="llama", tied=False),
        dict(intermediate=12288, layers=5, block_size=10, taps=(1, 8, 15, 22, 29), mask_token_id=128002),
        dict(vocab_size=128256, hidden=4096, heads=32, kv_heads=8, head_dim=128, context=131072),
    ),
    # To check tokens with: four layers, and four query heads to each key head. The second is for tests.
    "small": _shape(
        dict(intermediate=1024, layers=4, eps=1e-6, rope=Rope(1e6), qk_norm=True, family="qwen3", tied=False),
        dict(intermediate=1024, layers=2, block_size=16, taps=(0, 2), mask_token_id=4095),
        dict(vocab_size=4096, hidden=512, heads=8, kv_heads=2, head_dim=128, context=4096),
    ),
    "tiny": _shape(
        dict(intermediate=128, layers=4, eps=1e-6, rope=Rope(1e4), qk_norm=True, family="qwen3", tied=False),
        dict(intermediate=128, layers=2, block_size=8, taps=(0, 2), mask_token_id=511),
        dict(vocab_size=512, hidden=64, heads=8, kv_heads=2, head_dim=16, context=1024),
    ),
}


def random_pair(name: str, dtype: torch.dtype, device, seed: int = 0) -> tuple[Target, DraftHead]:
    """A target of the shape `name` and its head, with weights drawn on `device`.

    UsageError for a name that is not in SHAPES, UserError where memory is too small.
    """
    if name not in SHAPES:
        raise UsageError(f"unknown shape {name!r}: choose from {', '.join(SHAPES)}")
    shape = SHAPES[name]
    generator = torch.Generator(device).manual_seed(seed)
    with torch.device("meta"):
        models = Target(shape.target), DraftHead(shape.draft)
    weights = sum(parameter.numel() for model in models for parameter in model.parameters())
    require_memory(weights * dtype.itemsize, f"random weights of {name} in {str(dtype).removeprefix('torch.')}", device)
    target, draft = (randomise(model, dtype, device, generator) for model in models)
    if shape.target.tied:
        target.lm_head.weight = nn.Parameter(target.embed_tokens.weight, requires_grad=False)
    return ready(target), ready(draft)


def random_head(config: DraftConfig, dtype: torch.dtype, device) -> DraftHead:
    """A head of this shape with random weights, for a target of one's own."""
    with torch.device("meta"):
        draft = DraftHead(config)
    return ready(randomise(draft, dtype, device, torch.Generator(device).manual_seed(0)))


def ready(model: nn.Module) -> nn.Module:
    """The same model with its linear layers packed, as a loaded model has them."""
    for layer in linear_layers(model):
        layer.pack()
    return model.eval()


def randomise(model: nn.Module, dtype: torch.dtype, device, generator: torch.Generator) -> nn.Module:
    """Give a model on the meta device memory and weights: 1 in norms, and normally distributed elsewhere."""
    model.to(dtype).to_empty(device=device)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if isinstance(module, RMSNorm):
                parameter.data.fill_(1.0)
            else:
                parameter.data.normal_(std=SPREAD, generator=generator)
                parameter.data.copy_(parameter.data.bfloat16())  # 16 bits hold them, as published ones
    return model
