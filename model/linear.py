"""The one linear layer of the model, and how its weights are held once loaded.

On a CPU a decoding step is a few rows against every weight, so time is the bytes of weights streamed.
Published checkpoints store 16 bits a weight; holding 32 doubles the stream for nothing. `pack` therefore
stores a float32 layer in 16 bits where that loses nothing, in the layout of the half-precision FBGEMM kernel,
which widens each weight back to float32 as it streams: products and sums are float32, the weights are the
checkpoint's own. Half precision has a narrower exponent than bfloat16, so weights are first scaled by a power
of two, which is undone on the input and is exact. A layer that does not survive the round trip bit for bit
keeps float32 weights, in oneDNN's blocked layout.

It does not train: a packed layer has no `weight` any more.
"""

import math
from itertools import count
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HALF_TOP = 14  # largest weight is scaled into [2^14, 2^15): half precision overflows at 2^16

SLICE = 4096  # rows checked at a time, so that the check needs little memory beside the weights


class Linear(nn.Module):
    """y = x Wᵀ + bias.

    Attributes:
        weight: (out_features, in_features), None once packed
        bias: (out_features,) or None
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self.product = None  # set by pack(): (…, in_features) -> (…, out_features)
        self.handle = None  # set by pack(): () int64, names this layer to `packed_product`
        self.packed_bytes = 0

    def forward(self, x: Tensor) -> Tensor:
        """x (…, in_features) -> (…, out_features)."""
        if self.product is None:
            return F.linear(x, self.weight, self.bias)
        if torch.compiler.is_compiling():
            return torch.ops.minicast.packed_product(x, self.handle, self.out_features)
        return self.product(x)

    def pack(self) -> None:
        """Replace `weight` by the fastest layout for a few rows; float32 on a CPU only, elsewhere nothing
        happens."""
        weight = self.weight
        if weight.device.type != "cpu" or weight.dtype != torch.float32:
            return
        product = _half_product(weight, self.bias) or _blocked_product(weight, self.bias)
        if product is None:
            return
        self.product, bytes_per_weight = product
        self.handle = torch.tensor(next(_HANDLES))
        _PACKED[int(self.handle)] = self
        self.packed_bytes = weight.numel() * bytes_per_weight
        self.weight = None

    def weight_bytes(self) -> int:
        """Bytes that one product streams."""
        return self.packed_bytes if self.weight is None else self.weight.numel() * self.weight.element_size()


# A compiler cannot look into a packed layout, nor take it as an input; one layer compiled for all takes the
# layer's number instead, which this operator looks up.
_HANDLES, _PACKED = count(), WeakValueDictionary()
_LIBRARY = torch.library.Library("minicast", "DEF")
_LIBRARY.define("packed_product(Tensor x, Tensor handle, int out_features) -> Tensor")


@torch.library.impl(_LIBRARY, "packed_product", "CPU")
def packed_product(x: Tensor, handle: Tensor, out_features: int) -> Tensor:
    """x (…, in_features) -> (…, out_features), by the packed layer of that number."""
    return _PACKED[handle.item()].product(x)


@torch.library.impl(_LIBRARY, "packed_product", "Meta")
def _packed_shape(x: Tensor, handle: Tensor, out_features: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


def _half_product(weight: Tensor, bias: Tensor | None):
    """The product over 16-bit weights and its bytes a weight; None where 16 bits lose something or FBGEMM is
    absent."""
    if torch.backends.quantized.engine not in ("fbgemm", "x86"):
        return None
    largest = float(torch.stack(weight.aminmax()).abs().max())  # aminmax: no copy of the weights
    if not math.isfinite(largest):
        return None
    exponent = HALF_TOP - math.frexp(largest)[1] + 1 if largest else 0
    for shift in (0, exponent):  # unscaled first: it saves the multiplication of the input
        scale = 2.0**shift
        if all(torch.equal((rows * scale).half().float(), rows * scale) for rows in weight.split(SLICE)):
            break
    else:
        return None
    scaled = weight if shift == 0 else weight * scale
    packed = torch.ops.quantized.linear_prepack_fp16(scaled, None)

    def product(x: Tensor) -> Tensor:
        y = torch.ops.quantized.linear_dynamic_fp16(x if shift == 0 else x * (1.0 / scale), packed)
        return y if bias is None else y + bias

    return product, 2


def _blocked_product(weight: Tensor, bias: Tensor | None):
    """The product over float32 weights in oneDNN's blocked layout and its bytes a weight; None without
    oneDNN."""
    if not torch.backends.mkldnn.is_available():
        return None
    rows = 8  # the layout is chosen for so many input rows: a small tree; it serves any number
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)
    return (lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")), 4
