"""From the target's logits to a token: one law, one source of randomness (paper, Appendix C, the direct
sampled walk).

Legend: T temperature, P cached prefix length, d depth in the packed tree (the pending root b has depth 0),
V vocabulary size, n packed rows.

The law. `shape_logits` turns logits into log p, up to a constant: temperature, then top-k, then top-p. AR,
chain and tree all sample from what it returns. Temperature 0 is greedy: the argmax, equal logits going to the
lower id.

The choice. A token is drawn as argmax(log p + g) with Gumbel noise g, which has exactly the law p. The noise
is no generator's next output but a hash of (seed, absolute position, token id), so the token chosen for a
position depends on its prefix and the seed alone: not on the method, the width, the device, or where a round
began. The token chosen at a packed row of depth d, while b sits at position P, will sit at position P + d +
1; that is the position its noise is keyed by. All rows of one depth share one row of noise: the walk visits
only one of them.

What this file does not do: it knows neither trees nor models, and it holds no state between calls. Everything
has static shapes and copies nothing to the host, so the same functions run on the few rows a CPU visits and,
inside a CUDA graph, on all of them.
"""

import math
from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

# What the noise is for; each purpose has its own independent stream. The direct walk needs only the first.
CHOICE, PROPOSAL, ACCEPTANCE = 0, 1, 2
NO_CHOICE = -1  # in the place of a token, where the target's logits are not finite


@dataclass(frozen=True)
class SamplingParams:
    """What one request asks of sampling. What makes no sense is a ValueError of one line."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self):
        if not (_is_number(self.temperature) and 0 <= self.temperature < math.inf):
            raise ValueError(f"temperature must be a finite number of at least 0, got {self.temperature}")
        if self.top_k is not None and not (is_integer(self.top_k) and self.top_k >= 1):
            raise ValueError(f"top_k must be a whole number of at least 1 (leave it out to keep all), got {self.top_k}")
        if self.top_p is not None and not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not (is_integer(self.seed) and 0 <= self.seed < 2**63):
            raise ValueError(f"seed must be a whole number from 0 to 2**63 - 1, got {self.seed}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def is_integer(value) -> bool:
    """Whether it is a whole number, of any type, numpy's too; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def choose(logits: Tensor, params: SamplingParams, noise: Tensor | None = None) -> Tensor:
    """The target's choice at each row.

    logits: (rows, V), any float dtype
    noise:  (rows, V) from `gumbel_noise`; not read when greedy
    Returns (rows,) int64. A row whose logits hold NaN or +inf, or nothing but -inf, gives NO_CHOICE: no
    drafted token carries it, so the walk stops there and hands it to the caller, who reports non-finite logits.
    """
    if params.greedy:
        scores = logits
    else:
        shaped = shape_logits(logits, params)
        scores = shaped + noise
    best = scores.argmax(dim=1, keepdim=True)  # (rows, 1); lowest id among equals; a NaN beats all
    return torch.where(scores.gather(1, best).isfinite(), best, NO_CHOICE).squeeze(1)


def log_probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """log p of every token, (rows, V) -> (rows, V), fp32 or, for fp64 logits, fp64; -inf where p is 0."""
    return shape_logits(logits, params).log_softmax(dim=1)


def shape_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """log p up to a constant per row: temperature, then top-k, then top-p.

    logits: (rows, V). Returns (rows, V), fp32, or fp64 for fp64 logits: the greedy token has 0, tokens
    outside the support have -inf. At temperature 0 the support is the greedy token alone.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if params.greedy:
        greedy = logits.argmax(dim=1, keepdim=True)
        return torch.full_like(logits, -torch.inf).scatter(1, greedy, 0.0)

    # Subtracting the largest logit first keeps any temperature from overflowing, and keeps the differences
    # between the likely tokens exact. The bounds on T keep the quotient within fp32; beyond them the law is that
    # of the limit already.
    temperature = min(max(params.temperature, 1e-30), 1e30)
    shaped = (logits - logits.amax(dim=1, keepdim=True)).div_(temperature)
    top_p = 1.0 if params.top_p is None else params.top_p
    if params.top_k is not None and params.top_k < logits.shape[1]:
        from minicast.nucleus import keep_top_k

        return keep_top_k(shaped, params.top_k, top_p)
    if top_p == 1:
        return shaped
    from minicast.nucleus import keep_top_p

    return keep_top_p(shaped, top_p)


def gumbel_noise(
    seed: int | Tensor, positions: Tensor, vocab_size: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The noise that chooses the token at each position. (T,) -> (T, V).

    seed:      an int, or an int64 tensor of shape (1,) or (T,): a captured graph reads the seed from a buffer
    positions: (T,) int64, absolute positions of the tokens to be chosen
    """
    tokens = torch.arange(vocab_size, dtype=torch.int32, device=positions.device)
    return gumbel(keyed_uniform(seed, positions, tokens, CHOICE, dtype))


def gumbel(uniform: Tensor) -> Tensor:
    """Standard Gumbel values of uniform ones, any shape.

    The textbook form is -log(-log(u)). The largest values, which decide what is drawn, come from u close to
    1, where floats are coarse; with 1 - u for u they come from u close to 0, where floats are fine.
    """
    return uniform.neg().log1p_().neg_().log_().neg_()


def keyed_uniform(
    seed: int | Tensor, positions: Tensor, tokens: Tensor, purpose: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Uniform numbers strictly inside (0, 1), each a pure function of (seed, purpose, position, token).

    seed:      an int, or an int64 tensor of shape (1,) or (T,)
    positions: (T,) int64
    tokens:    (C,) or (T, C), any integer dtype
    Returns (T, C).

    A 64-bit hash of seed, position and purpose gives two 32-bit keys a row; a 32-bit hash of the token under
    these keys gives 31 bits a token. The integer part has the same bits on every device.
    """
    key = _mix64(_mix64(torch.zeros_like(positions) + seed) + positions * 4 + purpose)  # (T,)
    first, second = key.view(torch.int32).view(-1, 2, 1).unbind(dim=1)                   # (T, 1) each
    bits = _mix32(tokens.int() ^ first, second)                                          # (T, C) int32, >= 0
    # (bits + 1/2) / 2^31. The scale is a hair below 2^-31 since the largest would otherwise round to 1.
    scale = 2.0**-31 * (1 - torch.finfo(dtype).eps / 2)
    return bits.to(dtype).add_(0.5).mul_(scale)


def _mix64(x: Tensor) -> Tensor:
    """A bijection of int64 that looks random: the finaliser of splitmix64, whose constants these are."""
    x = x + -0x61C8864680B583EB
    x = (x ^ _shift_right(x, 30, 64)) * -0x40A7B892E31B1A47
    x = (x ^ _shift_right(x, 27, 64)) * -0x6B2FB644ECCEEE15
    return x ^ _shift_right(x, 31, 64)


def _mix32(x: Tensor, key: Tensor) -> Tensor:
    """31 random-looking bits for each int32 of x (T, C) under a key (T, 1): a bijection, less its lowest bit.

    Multiplications are those of the hash `triple32`, products wrap at 32 bits. The key goes in between, so
    that two rows whose inputs happen to be permutations of one another do not repeat each other. Works in x's
    memory.
    """
    x = x.bitwise_xor_(_shift_right(x, 17, 32)).mul_(-0x12A52B45)
    x = x.bitwise_xor_(_shift_right(x, 11, 32)).mul_(-0x53B3E4AF).bitwise_xor_(key)
    x = x.bitwise_xor_(_shift_right(x, 15, 32)).mul_(0x31848BAB)
    return _shift_right(x, 1, 32)


def _shift_right(x: Tensor, count: int, bits: int) -> Tensor:
    """x >> count with zeros shifted in; torch's own shift repeats the sign bit. Any shape."""
    return (x >> count).bitwise_and_((1 << (bits - count)) - 1)
