"""The one linear layer of the model, and how its weights are held once loaded.

On a CPU, a decoding step multiplies a few input rows by every weight, so its time is that of streaming the weights.
Published checkpoints store 16 bits a weight, and holding 32 would double the stream for nothing. Where 16 bits lose
nothing, a float32 layer therefore holds 16-bit weights, in one of two layouts. Each weight is widened as it streams,
and products and sums are float32. No layer holds both layouts at once.

- `pack` makes the layout that a loaded model has, that of FBGEMM's half-precision kernel, which needs no compiler.
  Half precision has a narrower exponent than bfloat16, so the weights are first scaled by a power of two, and the
  input by its inverse, which is exact. A layer whose weights would not come back bit for bit keeps float32 weights, in
  oneDNN's blocked layout.
- `to_panels` makes the layout that compiled layers read: panels of bfloat16 or half precision. For a few input rows
  they are read by `panel_product`, which a compiler turns into one loop over the weights, and which is slow without.

The layer does not train: once packed, it no longer has a `weight`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.memory import trim

HALF_TOP = 14  # the largest weight is scaled into [2^14, 2^15): half precision overflows at 2^16

SLICE = 4096  # rows checked at a time, so that the check needs little memory besides the weights

FEW_ROWS = 16  # up to so many input rows, one loop over the weights is faster than widening them first
PANEL = 16  # outputs that the loop computes side by side: one register of float32, or two


class Linear(nn.Module):
    """y = x Wᵀ + bias.

    Attributes:
        weight: (out_features, in_features), None while packed or in panels
        panels: (panels, in_features, PANEL) or None: panels[p, :, j] is row p·PANEL + j of the weight
        bias: (out_features,) or None
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self.packed: Packed | None = None
        self.panels: nn.Parameter | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x (…, in_features) -> (…, out_features)."""
        if self.packed is not None:
            y = self.packed.product(x)
        elif self.panels is None:
            return F.linear(x, self.weight, self.bias)
        elif x.numel() > FEW_ROWS * self.in_features or not torch.compiler.is_compiling():
            y = F.linear(x, self.dense().to(x.dtype))
        else:
            y = panel_product(x.reshape(-1, self.in_features), self.panels)
            y = y[:, : self.out_features].view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias

    def dense(self) -> Tensor:
        """The weight (out_features, in_features), whatever the layout: `weight` itself, or else a copy, which is in the
        panels' type or unpacked to float32."""
        if self.panels is not None:
            return self.panels.transpose(1, 2).flatten(0, 1)[: self.out_features]
        return self.weight if self.packed is None else self.packed.weight()

    def pack(self) -> None:
        """Replace `weight` by the layout that is fastest for a few rows without a compiler. Does nothing unless the
        weight is float32 and on a CPU."""
        weight = self.weight
        if weight.device.type != "cpu" or weight.dtype != torch.float32:
            return
        self.packed = _half_packed(weight) or _blocked_packed(weight)
        if self.packed is not None:
            self.weight = None

    def to_panels(self) -> None:
        """Replace packed weights by panels, of 16 bits where that loses nothing. Does nothing to a layer not packed."""
        if self.packed is not None:
            rows = F.pad(narrow(self.dense()), (0, 0, 0, -self.out_features % PANEL))
            panels = rows.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()
            self.panels, self.packed = nn.Parameter(panels, requires_grad=False), None

    def from_panels(self) -> None:
        """Undo `to_panels`."""
        if self.panels is not None:
            self.weight, self.panels = nn.Parameter(self.dense().float(), requires_grad=False), None
            self.pack()

    def weight_bytes(self) -> int:
        """Bytes that one product streams."""
        if self.packed is not None:
            return self.packed.bytes
        held = self.weight if self.panels is None else self.panels
        return held.numel() * held.element_size()


def linear_layers(*models: nn.Module) -> list[Linear]:
    """Every linear layer of these models, each once."""
    return [module for model in models for module in model.modules() if isinstance(module, Linear)]


def weight_bytes(*models: nn.Module) -> int:
    """Bytes that a pass through every linear layer streams."""
    return sum(layer.weight_bytes() for layer in linear_layers(*models))


def lay_out(*models: nn.Module | None, compiled: bool) -> None:
    """Put all linear layers into panels for compiled code, or back into the packed layout."""
    layers = linear_layers(*(model for model in models if model is not None))
    stale = [layer for layer in layers if (layer.packed if compiled else layer.panels) is not None]
    for layer in stale:
        layer.to_panels() if compiled else layer.from_panels()
        trim()  # after each layer: otherwise what all of them free would add to what they take


def narrow(weight: Tensor) -> Tensor:
    """weight (out_features, in_features) float32, in the first 16-bit type that holds it bit for bit, or as it is."""
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(rows.to(dtype).float(), rows) for rows in weight.split(SLICE)):
            return weight.to(dtype)
    return weight


def panel_product(x: Tensor, panels: Tensor) -> Tensor:
    """The product of a few rows and a weight in panels, written to be compiled for a CPU.

    x (rows, in_features) float32, at most FEW_ROWS rows; panels (panels, in_features, PANEL), 16 or 32 bits
    -> (rows, panels · PANEL) float32, the padding of the last panel included.

    There is one sum for each row of x, all over the same in_features, so Inductor fuses them into one loop. In it, a
    slice of a panel is loaded and widened once for all rows, and the sums stay in registers as far as there are
    enough.
    """
    # as_strided puts x into memory: without it, Inductor would compute x again in every turn of the loop.
    rows = x.as_strided(x.shape, x.stride()).unbind()
    sums = [(row[:, None] * panels.float()).sum(1) for row in rows]
    return torch.cat(sums).view(len(rows), -1)  # each sum is written to its place


@dataclass(frozen=True)
class Packed:
    """A weight (out_features, in_features) in a layout that only one kernel can read.

    Attributes:
        product: x (…, in_features) float32 -> (…, out_features) float32, without a bias
        weight: () -> a copy (out_features, in_features) float32, bit for bit as it was
        bytes: how many one product streams
    """

    product: Callable[[Tensor], Tensor]
    weight: Callable[[], Tensor]
    bytes: int


def _half_packed(weight: Tensor) -> Packed | None:
    """weight (out_features, in_features) float32 in 16 bits, for FBGEMM. None where that loses something, or without
    FBGEMM."""
    if torch.backends.quantized.engine not in ("fbgemm", "x86"):
        return None
    largest = float(torch.stack(weight.detach().aminmax()).abs().max())  # aminmax: no copy of the weights
    if not math.isfinite(largest):
        return None
    exponent = HALF_TOP - math.frexp(largest)[1] + 1 if largest else 0
    for shift in (0, exponent):  # unscaled first: then the input needs no scaling
        scale = 2.0**shift
        if all(torch.equal((rows * scale).half().float(), rows * scale) for rows in weight.split(SLICE)):
            break
    else:
        return None
    packed = torch.ops.quantized.linear_prepack_fp16(weight if shift == 0 else weight * scale, None)

    def product(x: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic_fp16(x if shift == 0 else x * (1.0 / scale), packed)

    def unpacked() -> Tensor:
        return torch.ops.quantized.linear_unpack_fp16(packed)[0].mul_(1.0 / scale)

    return Packed(product, unpacked, 2 * weight.numel())


def _blocked_packed(weight: Tensor) -> Packed | None:
    """weight (out_features, in_features) float32 in oneDNN's blocked layout. None without oneDNN."""
    if not torch.backends.mkldnn.is_available():
        return None
    # The layout is chosen for 8 input rows, a small tree, and works for any number of them.
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 8)

    def product(x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")

    return Packed(product, packed.to_dense, 4 * weight.numel())
