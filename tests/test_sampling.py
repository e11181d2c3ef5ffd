"""Sampling: the law that logits stand for, and the keyed noise that draws from it.

The noise is a pure function of its keys, so these tests pass or fail for good. A stated false-alarm
probability is the chance that a sound hash with other constants would fail.
"""

import math

import numpy as np
import pytest
import torch

from minicast import sampling
from minicast.sampling import (
    ACCEPTANCE,
    CHOICE,
    PROPOSAL,
    SamplingParams,
    choose,
    gumbel,
    gumbel_noise,
    keyed_uniform,
    log_probabilities,
    shape_logits,
)

# ------------------------------------------------------------------------------------------- the request


@pytest.mark.parametrize(
    "flag, values",
    [
        ("temperature", (-1, -1e-9, math.nan, math.inf, -math.inf, "hot", None, True)),
        ("top_k", (0, -5, 2.5, "all", True)),
        ("top_p", (0, -0.1, 1.5, math.nan, math.inf, "most", True)),
        ("seed", (-1, 2**63, 0.5, None)),
    ],
)
def test_a_senseless_request_is_refused_by_name(flag, values):
    """One line that names the setting and the value. Guards against NaN passing a comparison, and True passing
    as 1."""
    for value in values:
        with pytest.raises(ValueError, match=f"{flag} .* got {value}") as error:
            SamplingParams(**{"temperature": 1.0, flag: value})
        assert "\n" not in str(error.value)


def test_a_sensible_request_is_taken():
    for request in ((0,), (1e-320, 10**6, 1e-9, 2**63 - 1), (2, 1, 1)):
        params = SamplingParams(*request)
        assert params.greedy == (params.temperature == 0)


# ----------------------------------------------------------------------------------------------- the law


def slow_support(values, top_k, top_p):
    """Tokens kept in one row, by sorting: by value, then by lower id. values: (V,) after temperature. Returns
    a set."""
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    order = [token for token in order if values[token] > -math.inf][:top_k]
    mass = [math.exp(values[token]) for token in order]
    kept, before = set(), 0.0
    for token, here in zip(order, mass):
        if top_p is not None and before >= top_p * sum(mass):
            break
        kept.add(token)
        before += here
    return kept


def random_logits(rng, rows, vocab_size):
    """Logits of several shapes (rows, V): smooth, on a coarse grid (many ties, as bf16 has), flat, and with
    -inf."""
    logits = 3 * rng.normal(size=(rows, vocab_size))
    logits[1::4] = np.round(logits[1::4])
    logits[2::4] = np.round(logits[2::4] / 8)
    logits[3::4][rng.random(logits[3::4].shape) < 0.5] = -np.inf
    logits[:, 0] = 1.0  # so that no row is all -inf
    return torch.from_numpy(logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_support_equals_sorting(dtype):
    """Top-k, top-p and both keep what a sort keeps, ties by lower id, whether rows come alone or together.

    Together is the captured path, alone is the CPU's: a support that depended on it would give the methods
    different text. Cutting points that no tie decides are far apart here against the rounding of any sum.
    """
    rng = np.random.default_rng(2)
    logits = random_logits(rng, 12, 97).to(dtype)
    for temperature in (0.4, 1.0):
        for top_k, top_p in (
            *((None, None), (1, None), (5, None), (96, None)),
            *((None, 0.05), (None, 0.5), (None, 0.93), (None, 0.9999)),
            *((7, 0.6), (40, 0.97), (1, 0.5)),
        ):
            params = SamplingParams(temperature, top_k, top_p)
            shaped = shape_logits(logits, params)
            assert shaped.dtype == dtype
            plain = ((logits - logits.amax(dim=1, keepdim=True)) / temperature).double()
            for row in range(len(logits)):
                alone = shape_logits(logits[row : row + 1], params)
                assert torch.equal(alone[0], shaped[row])
                kept = (shaped[row] > -torch.inf).nonzero()[:, 0].tolist()
                assert set(kept) == slow_support(plain[row].tolist(), top_k, top_p), (row, params)
                torch.testing.assert_close(shaped[row, kept].double(), plain[row, kept])


def test_temperature_comes_first():
    """The nucleus is that of the scaled law: p = (.5, .3, .2) at top-p 0.6 keeps two tokens, at T = 1/4 only
    one."""
    logits = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log()
    law = log_probabilities(logits, SamplingParams(1.0, top_p=0.6)).exp()
    torch.testing.assert_close(law, torch.tensor([[0.625, 0.375, 0.0]], dtype=torch.float64))
    assert log_probabilities(logits, SamplingParams(0.25, top_p=0.6)).exp().tolist() == [[1.0, 0.0, 0.0]]


def test_top_k_comes_before_top_p():
    """p = (.4, .3, .2, .1), top-k 2, top-p 0.5: of (4/7, 3/7) the first token alone reaches one half."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    for top_k, kept in ((2, [True, False, False, False]), (None, [True, True, False, False])):
        assert (shape_logits(logits, SamplingParams(1.0, top_k, 0.5)) > -torch.inf).tolist() == [kept]


def test_nucleus_of_exact_ties_ends_at_the_lower_ids():
    """Eight equal tokens, two -inf: top-p 0.5 keeps four, 0.51 five, and top-k 3 three, always the lowest
    ids."""
    logits = torch.full((1, 10), 2.0)
    logits[0, [0, 4]] = -torch.inf
    for params, kept in (
        (SamplingParams(1.0, top_p=0.5), [1, 2, 3, 5]),
        (SamplingParams(1.0, top_p=0.51), [1, 2, 3, 5, 6]),
        (SamplingParams(1.0, top_k=3), [1, 2, 3]),
        (SamplingParams(1.0, top_k=3, top_p=0.4), [1, 2]),
        (SamplingParams(1.0, top_k=4, top_p=0.5), [1, 2]),  # these reach it exactly
    ):
        assert (shape_logits(logits, params)[0] > -torch.inf).nonzero()[:, 0].tolist() == kept


def test_ties_far_apart_are_counted_together():
    """In 16 bits a vocabulary has many equal logits. They are counted in blocks, of which the last may be short."""
    rng = np.random.default_rng(5)
    for vocab_size in (128, 300, 1000):
        logits = torch.from_numpy(rng.integers(0, 2, (3, vocab_size))).float()
        for top_k in (1, vocab_size // 4, vocab_size - 5):
            shaped = shape_logits(logits, SamplingParams(1.0, top_k))
            best = logits.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
            assert torch.equal(shaped > -torch.inf, torch.zeros_like(logits).scatter(1, best, 1.0).bool())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extremes_are_finite_and_greedy(dtype):
    """Vanishing temperatures and nuclei, and huge logits, give the greedy token: no overflow, no 0 / 0, no
    NaN."""
    rng = np.random.default_rng(4)
    logits = torch.from_numpy(rng.normal(size=(20, 50))).to(dtype)
    spread = torch.where(logits > 0, 1e4, -1e4).to(dtype) + logits
    noise = gumbel_noise(3, torch.arange(20), 50, dtype)
    for request in ((0.0,), (1e-30,), (1e-320,), (1.0, None, 1e-9), (1.0, None, 1e-320), (1.0, 1)):
        params = SamplingParams(*request)
        for values in (logits, spread):
            assert torch.equal(choose(values, params, noise), values.argmax(dim=1)), params
            assert not log_probabilities(values, params).isnan().any()
    gapped = logits.round(decimals=2) + torch.linspace(0, 1e-3, 50).to(dtype)  # top two at least 1e-5 apart
    gapped.scatter_add_(1, gapped.argmax(dim=1, keepdim=True), torch.full((20, 1), 0.01, dtype=dtype))
    assert torch.equal(choose(gapped, SamplingParams(1e-4), noise), gapped.argmax(dim=1))
    with_excluded = torch.cat([logits, torch.full((20, 1), -torch.inf, dtype=dtype)], dim=1)
    assert torch.equal(*(shape_logits(with_excluded, SamplingParams(T)) for T in (1e308, 10**400)))
    hot = shape_logits(with_excluded, SamplingParams(1e308))
    assert (hot[:, :-1].abs() < 1e-6).all() and (hot[:, -1] == -torch.inf).all()


def test_equal_logits_go_to_the_lower_id():
    """Greedy, top-k 1 and a vanishing nucleus pick 3 of the equal 3 and 7, in every dtype, whatever the
    noise."""
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        logits = torch.zeros(1, 10, dtype=dtype)
        logits[0, [3, 7]] = 2.0
        for seed in range(20):
            noise = gumbel_noise(seed, torch.tensor([5]), 10)
            for params in (SamplingParams(), SamplingParams(1.5, top_k=1), SamplingParams(1.5, top_p=1e-9)):
                assert choose(logits, params, noise).tolist() == [3]


def test_top_k_of_the_whole_vocabulary_is_no_top_k():
    """k = V, V + 1 and 10^6 choose as no top-k does; so does top-p 1. Guards against an index beyond the
    vocabulary."""
    logits = torch.randn(500, 30, generator=torch.Generator().manual_seed(0))
    noise = gumbel_noise(1, torch.arange(500), 30)
    expected = choose(logits, SamplingParams(1.3), noise)
    for params in (SamplingParams(1.3, 30), SamplingParams(1.3, 31), SamplingParams(1.3, 10**6),
                   SamplingParams(1.3, None, 1.0)):  # fmt: skip
        assert torch.equal(choose(logits, params, noise), expected)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(0.7), SamplingParams(0.7, 3, 0.9)])
def test_non_finite_rows_give_minus_one(params):
    """NaN, +inf or nothing but -inf in one row is reported there, and only there; single -inf logits are
    fine.

    Guards against printing token 0 for ever when a model overflows.
    """
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    logits[0, 4] = torch.nan
    logits[1, 2] = torch.inf
    logits[2] = -torch.inf
    logits[3, :6] = -torch.inf
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        chosen = choose(logits.to(dtype), params, gumbel_noise(0, torch.arange(5), 8))
        assert (chosen < 0).tolist() == [True, True, True, False, False]
        assert chosen[3] >= 6


# --------------------------------------------------------------------------------------------- the noise


def slow_bits(seed, position, token, purpose):
    """The hash on Python integers: what the tensor form computes, written out once more."""

    def mix64(x):
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    key = mix64((mix64(seed) + 4 * position + purpose) % 2**64)
    x = token ^ key % 2**32
    x = (x ^ x >> 17) * 0xED5AD4BB % 2**32
    x = (x ^ x >> 11) * 0xAC4C1B51 % 2**32
    x ^= key >> 32
    x = (x ^ x >> 15) * 0x31848BAB % 2**32
    return x >> 1


def test_noise_is_the_written_hash():
    """Bit for bit, over seeds, positions, tokens and purposes, whole rows and picked tokens.

    What is pinned here is the same on every device, so that a seed's text is.
    """
    positions = torch.tensor([0, 1, 77, 2**17, 2**31 + 5])
    tokens = torch.tensor([0, 1, 2, 49151, 151935])
    for seed in (0, 1, 12345, 2**63 - 1):
        for purpose in (CHOICE, PROPOSAL, ACCEPTANCE):
            uniform = keyed_uniform(seed, positions, tokens, purpose, torch.float64)
            expected = [[slow_bits(seed, p, t, purpose) for t in tokens.tolist()] for p in positions.tolist()]
            assert (uniform * 2**31 - 0.5).round().long().tolist() == expected
            repeated = tokens.expand(5, -1)
            by_tensor = keyed_uniform(torch.tensor([seed]), positions, repeated, purpose, torch.float64)
            assert torch.equal(by_tensor, uniform)
    assert torch.equal(gumbel_noise(9, positions, 50)[2], gumbel_noise(9, positions[2:3], 50)[0])
    assert torch.equal(
        gumbel_noise(9, positions, 50, torch.float64),
        gumbel(keyed_uniform(9, positions, torch.arange(50), CHOICE, torch.float64)),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_bits_give_finite_noise(dtype, monkeypatch):
    """All zeros and all ones stay strictly inside (0, 1), and the upper tail is finely resolved in fp32 too.

    Of 152,000 Gumbel values the largest is near 12, at u = 1 - 6e-6, where fp32 has no more than a hundred
    steps left in the textbook form: ties among tokens, settled by id, would bias the draw.
    """
    bits = torch.tensor([[0, 1, 2, 2**31 - 2, 2**31 - 1]], dtype=torch.int32)
    monkeypatch.setattr(sampling, "_mix32", lambda x, key: bits.clone())
    uniform = keyed_uniform(0, torch.tensor([0]), torch.arange(5), CHOICE, dtype)
    assert (uniform > 0).all() and (uniform < 1).all()
    noise = gumbel(uniform)[0]
    assert noise.isfinite().all()
    expected = [-math.log(-math.log1p(-(b + 0.5) / 2**31)) for b in (0, 1, 2)]
    torch.testing.assert_close(noise[:3], torch.tensor(expected, dtype=dtype))


def chi_square_excess(counts, expected):
    """Standard score of Pearson's statistic; near a normal deviate for the hundreds of bins used here."""
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = counts.numel() - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def laid_out(seeds, positions, tokens):
    """(rows, columns) uniform numbers in fp64."""
    return keyed_uniform(seeds, positions, tokens, CHOICE, torch.float64)


THOUSAND, NOTHING = torch.arange(1000), torch.zeros(1000, dtype=torch.int64)
# A million numbers each, whose neighbours are neighbours along one key.
LAYOUTS = {
    "tokens of one row": lambda: laid_out(0, NOTHING[:1], torch.arange(10**6)),
    "tokens, then positions": lambda: laid_out(0, THOUSAND, THOUSAND),
    "positions, then tokens": lambda: laid_out(0, THOUSAND, THOUSAND).T,
    "positions of one token": lambda: laid_out(5, torch.arange(10**6), NOTHING[:1]),
    "tokens, then seeds": lambda: laid_out(THOUSAND, NOTHING, THOUSAND),
    "seeds, then tokens": lambda: laid_out(THOUSAND, NOTHING, THOUSAND).T,
    "seed up, position down": lambda: laid_out(THOUSAND, 1000 - THOUSAND, THOUSAND).T,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_noise_is_uniform_and_independent(layout):
    """Along tokens, positions and seeds: high, middle and low bits uniform, neighbours independent in twos
    and threes.

    63 chi-squares of 256 bins or more on a million numbers, each within 6 standard scores: false alarm 1e-5
    in all. Guards against a lattice, rows that repeat each other shifted or permuted, and seeds that only
    shift positions.
    """
    bits = (LAYOUTS[layout]().flatten() * 2**31).long()
    for byte in (bits >> 23, bits >> 12 & 255, bits & 255):
        assert abs(chi_square_excess(torch.bincount(byte, minlength=256).double(), len(bits) / 256)) < 6
    for stride in (1, 2, 999, 1000, 1001):
        pair = (bits[:-stride] >> 26) * 32 + (bits[stride:] >> 26)
        counts = torch.bincount(pair, minlength=1024).double()
        assert abs(chi_square_excess(counts, len(pair) / 1024)) < 6, stride
    triple = (bits[:-2] >> 28) * 64 + (bits[1:-1] >> 28) * 8 + (bits[2:] >> 28)
    assert abs(chi_square_excess(torch.bincount(triple, minlength=512).double(), len(triple) / 512)) < 6


def test_rows_do_not_correlate():
    """Correlations among 600 rows of positions, seeds and purposes look like those of independent rows.

    180,000 correlations of 4,096 numbers each: none above 7 standard deviations (false alarm 5e-7), and their
    mean square within 2 % of 1 / 4,096 (its own deviation is 0.33 %).
    """
    positions = torch.arange(200)
    tokens = torch.arange(4096)
    rows = torch.cat([
        keyed_uniform(0, positions, tokens, CHOICE, torch.float64),
        keyed_uniform(1 + positions, torch.zeros_like(positions), tokens, CHOICE, torch.float64),
        keyed_uniform(0, positions, tokens, PROPOSAL, torch.float64)[:100],
        keyed_uniform(0, positions, tokens, ACCEPTANCE, torch.float64)[:100],
    ])  # fmt: skip
    rows = (rows - rows.mean(dim=1, keepdim=True)) / rows.std(dim=1, keepdim=True)
    correlation = (rows @ rows.T / 4096)[torch.triu(torch.ones(600, 600, dtype=torch.bool), diagonal=1)]
    assert correlation.abs().max() < 7 / math.sqrt(4096)
    assert abs(float(correlation.square().mean()) * 4096 - 1) < 0.02


def test_every_key_bit_moves_every_bit():
    """Flipping one bit of seed, position or token flips each of the 31 output bits in half of 4,000 cases.

    2,976 frequencies with deviation 0.0079 each within 0.045: false alarm 4e-5.
    """
    cases = 4_000
    rng = np.random.default_rng(6)
    seeds = torch.from_numpy(rng.integers(0, 2**62, cases))
    positions = torch.from_numpy(rng.integers(0, 2**20, cases))
    tokens = torch.from_numpy(rng.integers(0, 2**18, (cases, 1)))

    def bits(seeds, positions, tokens):
        uniform = keyed_uniform(seeds, positions, tokens, CHOICE, torch.float64)
        return ((uniform * 2**31).long() >> torch.arange(31)) & 1  # (cases, 31)

    before = bits(seeds, positions, tokens)
    flips = [(seeds ^ 1 << i, positions, tokens) for i in range(0, 62)]
    flips += [(seeds, positions ^ 1 << i, tokens) for i in range(17)]
    flips += [(seeds, positions, tokens ^ 1 << i) for i in range(17)]
    for flipped in flips:
        frequency = (bits(*flipped) != before).double().mean(dim=0)
        assert (frequency - 0.5).abs().max() < 0.045


def test_collisions_are_those_of_chance():
    """Among 2^18 numbers of 31 bits over many positions, about 16 pairs coincide: between 2 and 40 must.

    False alarm 2e-5 below, 1e-7 above. Guards against rows that share values and against lost bits.
    """
    uniform = keyed_uniform(3, torch.arange(512), torch.arange(512), CHOICE, torch.float64)
    distinct = len(uniform.flatten().unique())
    assert 2 <= 2**18 - distinct <= 40


def test_gumbel_moments_and_tail():
    """fp32 and fp64 noise agree where it matters; mean, variance and tail are those of the Gumbel law (a
    million draws).

    Mean within 6 of its deviations, variance within 1 %, the count above 9 (123 expected) within 6: false
    alarm 1e-8.
    """
    positions = torch.arange(20)
    exact = gumbel_noise(0, positions, 50_000, torch.float64)
    noise = gumbel_noise(0, positions, 50_000).double()
    upper = exact > -1.5  # below, where no draw is ever decided, fp32 is coarse
    torch.testing.assert_close(noise[upper], exact[upper], atol=1e-5, rtol=1e-5)
    assert abs(float(noise.mean()) - 0.5772157) < 6 * 1.2825 / 1000
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.0165
    assert abs(int((noise > 9).sum()) - 123.4) < 6 * math.sqrt(123.4)


def test_choices_have_the_law():
    """argmax(log p + g) over 200,000 positions: frequencies of 12 tokens, two of them rare, fit p.

    Chi-square within 6 standard scores of its mean (false alarm 1e-5), processors off and on; excluded tokens
    never.
    """
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 1.5, -torch.inf, -4.0, -6.0, 0.3, 0.2]])
    noise = gumbel_noise(8, torch.arange(200_000), 12)
    for request in ((1.0,), (0.7,), (1.0, 5), (1.5, None, 0.8)):
        params = SamplingParams(*request)
        p = log_probabilities(logits.double(), params)[0].exp()
        shaped = shape_logits(logits, params).expand(200_000, -1)
        counts = torch.bincount(choose(shaped, SamplingParams(1.0), noise), minlength=12)
        assert (counts[p == 0] == 0).all()
        assert chi_square_excess(counts[p > 0].double(), 200_000 * p[p > 0]) < 6


def test_seeds_differ_and_repeat():
    """The same seed gives the same choices, ten seeds give ten different ones."""
    logits = torch.randn(40, 20, generator=torch.Generator().manual_seed(0))

    def text(seed):
        return tuple(choose(logits, SamplingParams(1.0), gumbel_noise(seed, torch.arange(40), 20)).tolist())

    assert text(1) == text(1)
    assert len({text(seed) for seed in range(1, 11)}) == 10


@pytest.mark.slow
def test_compiled_equals_eager():
    """torch.compile gives the eager integers, support and choices, and reads the seed from a tensor.

    Guards against a compiler that takes products of int32 not to wrap, or breaks ties its own way.
    """
    logits = random_logits(np.random.default_rng(9), 8, 3000).float()
    positions = torch.arange(8)

    def chosen(seed, params):
        noise = gumbel_noise(seed, positions, 3000)
        return keyed_uniform(seed, positions, torch.arange(3000), CHOICE), choose(logits, params, noise)

    for request in ((0.0,), (0.7,), (0.9, 50), (0.9, 50, 0.9)):
        params = SamplingParams(*request)
        compiled = torch.compile(chosen, fullgraph=True)
        for seed in (torch.tensor([1]), torch.tensor([2])):
            for fast, slow in zip(compiled(seed, params), chosen(seed, params)):
                assert torch.equal(fast, slow)
