"""The hand-written target and head against stored reference values, and their cached passes against uncached ones.

Reference values are from an independent implementation; see tests/goldens.
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from graphs.masks import BODIES
from model import load_draft, load_target
from model.config import DraftConfig, Rope
from model.errors import UsageError
from model.linear import PANEL, SLICE, Linear, lay_out, panel_product
from model.transformer import KVCache, RMSNorm, Rotary, dot_product_attention, rope_frequencies

GOLDENS = Path(__file__).parent / "goldens"
TOLERANCE = 1e-4  # relative to the largest value, float32


def close(ours, theirs):
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-llama"])
def test_logits_and_every_layer_match_the_reference(name):
    """Families differ in q/k norms, RoPE scaling and tying; a tap that is off by one layer shows here, not in R."""
    target, golden = load_target(GOLDENS / name), load_file(GOLDENS / name / "golden.safetensors")
    layers = target.config.layers
    logits, features = target.score(golden["input_ids"][0], taps=range(layers))
    assert close(logits, golden["logits"][0]) < TOLERANCE
    for layer, output in enumerate(features.unflatten(-1, (layers, -1)).unbind(1)):
        assert close(output, golden["layer_outputs"][layer, 0]) < TOLERANCE, f"layer {layer}"


@pytest.mark.parametrize("taps", [(99,), (0, -1)])
def test_a_tap_that_is_no_layer_is_a_usage_error(taps):
    """A KeyError names a number and not what it is; Python's -1 would not be the last layer either."""
    with pytest.raises(UsageError, match=r"taps are layers, 0 to \d+ in this target, got \["):
        load_target(GOLDENS / "tiny-llama").score([1, 2, 3], taps=taps)


@pytest.mark.parametrize("token", [-1, 128, 10**6])
def test_a_token_that_the_target_does_not_know_is_a_usage_error(token):
    """By list or tensor; the last one that it knows is none."""
    target = load_target(GOLDENS / "tiny-llama")
    assert target.score([target.vocab_size - 1])[0].shape == (1, target.vocab_size)
    for tokens in ([1, token, 2], torch.tensor([token])):
        with pytest.raises(UsageError, match=rf"ids below {target.vocab_size}, .*: is the tokenizer its own\?"):
            target.score(tokens)


@pytest.mark.parametrize("mask", [(1, 40), (3, 1, 1, 40), None], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_of_one_row_equals_the_formula(mask, dtype):
    """One row takes a path of its own, by groups of heads; here every head is a product of its own."""
    torch.manual_seed(0)
    q, keys, values = (torch.randn(3, heads, rows, 16).to(dtype) for heads, rows in ((6, 1), (2, 40), (2, 40)))
    seen = torch.ones(1, 40, dtype=torch.bool) if mask is None else torch.rand(mask) < 0.7
    out = dot_product_attention(q, keys, values, None if mask is None else seen)
    for batch in range(3):
        for head in range(6):
            scores = keys[batch, head // 3].float() @ q[batch, head, 0].float() / 4
            shares = scores.masked_fill(~seen[batch if seen.ndim > 2 else 0].view(40), -torch.inf).softmax(0)
            expected = shares @ values[batch, head // 3].float()
            assert close(out[batch, head, 0].float(), expected) < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("round_index", [0, 1])
def test_draft_head_matches_the_reference(round_index):
    """The second round has a longer prefix: positions, the order of taps and where masks sit all show."""
    target, draft = load_target(GOLDENS / "tiny-qwen3"), load_draft(GOLDENS / "tiny-dflash")
    golden = load_file(GOLDENS / "tiny-dflash" / "golden.safetensors")
    prefix = int(golden[f"round{round_index}_prefix_length"])
    root = int(golden[f"round{round_index}_root"])
    log_q = draft.score(golden["context_features"][0, :prefix], root, target)
    reference = torch.log_softmax(golden[f"round{round_index}_logits"][0], dim=-1)
    assert log_q.shape == (draft.block_size - 1, target.vocab_size)
    assert close(log_q, reference) < TOLERANCE


def test_tap_features_are_what_the_head_was_given():
    """A tap is the output of its layer, concatenated in the head's order."""
    target, draft = load_target(GOLDENS / "tiny-qwen3"), load_draft(GOLDENS / "tiny-dflash")
    golden = load_file(GOLDENS / "tiny-dflash" / "golden.safetensors")
    _, features = target.score(golden["input_ids"][0], taps=draft.taps)
    assert close(features, golden["context_features"][0]) < TOLERANCE


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("pieces", [(10, 4), (1, 1), (13, 1), (1, 12, 1), (14,)])
def test_cached_pieces_equal_one_pass(body, pieces):
    """A causal mask aligned to the wrong corner is right for the first piece and wrong for every later one."""
    target = load_target(GOLDENS / "tiny-llama")
    tokens = torch.randint(0, 128, (sum(pieces),), generator=torch.Generator().manual_seed(0))
    whole, _ = target.score(tokens)
    cache, attention, prefix, rows = KVCache(target.config, 24, target.dtype, "cpu"), BODIES[body](), 0, []
    for piece in pieces:
        visible = torch.ones(piece, piece, dtype=torch.bool).tril()
        window = attention.window(torch.tensor([prefix]), prefix, torch.arange(piece), visible, cache.data.shape[4])
        with torch.no_grad():
            hidden, _ = target(tokens[None, prefix : prefix + piece], cache, window)
        rows.append(target.logits(hidden[0]))
        prefix += piece
    assert torch.allclose(torch.cat(rows), whole, atol=1e-4)


def test_half_precision_layout_loses_nothing():
    """bfloat16 weights, tiny ones included, survive the 16-bit packing exactly; weights that would not stay 32-bit."""
    generator = torch.Generator().manual_seed(0)
    stored = torch.randn(96, 64, generator=generator).mul(0.02).bfloat16().float()
    stored[0, :8] = torch.tensor([1e-9, -3e-8, 2e-6, 0.0, 0.9, -0.9, 1e-7, 5e-9]).bfloat16().float()
    for weight, bits in ((stored, 16), (torch.randn(96, 64, generator=generator), 32)):
        layer = Linear(64, 96)
        layer.weight.data.copy_(weight)
        layer.pack()
        if layer.weight is not None:
            pytest.skip("no packed layout on this CPU")
        assert layer.weight_bytes() * 8 == weight.numel() * bits
        identity = layer(torch.eye(64))  # one product a weight: any rounding of the weights would show
        assert torch.equal(identity.T.contiguous(), weight)
        x = torch.randn(5, 64, generator=generator)
        assert torch.allclose(layer(x).double(), x.double() @ weight.double().T, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
def test_unpacked_panels_are_the_weights_that_were_packed(dtype, bias):
    """There and back between the layouts, bit for bit, for every number of rows; the product of few rows, of many, and
    the packed one are the same."""
    generator = torch.Generator().manual_seed(0)
    for columns, rows in ((64, 96), (33, 7)):
        layer = Linear(columns, rows, bias)
        weight = torch.randn(rows, columns, generator=generator).to(dtype).float()
        layer.weight.data = weight.clone()
        if bias:
            layer.bias.data = torch.randn(rows, generator=generator)
        for _ in range(2):
            layer.pack()
            if layer.weight is not None:
                pytest.skip("no packed layout on this CPU")
            layer.to_panels()
            assert layer.packed is None and layer.panels.dtype == dtype
            for row in range(rows):
                assert torch.equal(layer.panels[row // PANEL, :, row % PANEL].float(), weight[row])
            for m in (1, 2, 3, 4, 5, 8, 11, 16, 17, 40):
                x = torch.randn(1, m, columns, generator=generator)
                expected = F.linear(x.double(), weight.double(), layer.bias if layer.bias is None else layer.bias.double())
                assert layer(x).shape == expected.shape
                assert torch.allclose(layer(x).double(), expected, atol=1e-4)
                few = panel_product(x[0], layer.panels)[:, :rows] + (layer.bias if bias else 0.0)  # as it is compiled
                assert torch.allclose(few.double(), expected[0], atol=1e-4)
            layer.from_panels()
            assert layer.weight is None and layer.panels is None
            assert torch.allclose(layer(x).double(), expected, atol=1e-4)
            layer.weight, layer.packed = torch.nn.Parameter(weight.clone()), None


def test_laying_out_a_model_changes_all_its_weights_and_back():
    """Inside a layer and outside; memory holds nothing twice."""
    target = load_target(GOLDENS / "tiny-llama")
    tokens = torch.arange(12)
    expected, _ = target.score(tokens)
    lay_out(target, compiled=True)
    linears = [module for module in target.modules() if isinstance(module, Linear)]
    assert target.lm_head in linears
    assert all(module.packed is None and module.panels is not None for module in linears)
    assert torch.allclose(target.score(tokens)[0], expected, atol=1e-4)
    lay_out(target, compiled=False)
    assert all(module.packed is not None and module.panels is None for module in linears)
    assert torch.equal(target.score(tokens)[0], expected)


@pytest.mark.parametrize("rope, expected, factor", [
    (
        Rope(1e4, "yarn", 4.0, original_context=512),
        [1.0, 0.256935, 0.0625, 0.013835, 0.0025, 0.000790569, 0.00025, 7.90569e-05], 1.138629436,
    ),
    (
        Rope(1e4, "yarn", 4.0, original_context=32),
        [1.0, 0.197642, 0.025, 0.00790569, 0.0025, 0.000790569, 0.00025, 7.90569e-05], 1.138629436,
    ),
    (
        Rope(1e4, "yarn", 2.0, original_context=512, beta_fast=16.0, beta_slow=2.0, attention_factor=1.5),
        [1.0, 0.316228, 0.0833333, 0.0210819, 0.005, 0.00158114, 0.0005, 0.000158114], 1.5,
    ),
])  # fmt: skip
def test_yarn_frequencies_match_the_reference(rope, expected, factor):
    """Computed by transformers 4.57.1 (`_compute_yarn_parameters`), at head_dim 16. No reference model here has yarn."""
    frequencies, scale = rope_frequencies(rope, 16, context=4096)
    torch.testing.assert_close(frequencies, torch.tensor(expected), rtol=1e-5, atol=0.0)
    assert scale == pytest.approx(factor)
    shape = dict(hidden=32, intermediate=32, layers=1, heads=2, kv_heads=2, head_dim=16, eps=1e-6, context=4096)
    cos, signed_sin = Rotary(DraftConfig(
        vocab_size=8, block_size=4, taps=(0,), mask_token_id=7, target_layers=1, qk_norm=True, rope=rope, **shape
    ))(torch.tensor([0, 700]), torch.float32)  # fmt: skip
    torch.testing.assert_close(cos**2 + signed_sin**2, torch.full((2, 16), factor**2))


def test_a_weight_that_16_bits_do_not_hold_is_found_wherever_it_lies():
    """The check goes by slices of rows: one that stopped at the first would round what lies behind."""
    weight = torch.ones(SLICE + 1, 2)
    weight[SLICE] = 1 / 3
    layer = Linear(2, SLICE + 1)
    layer.weight.data = weight.clone()
    layer.pack()
    if layer.weight is not None:
        pytest.skip("no packed layout on this CPU")
    assert torch.equal(layer(torch.eye(2)).T, weight)
    layer.to_panels()
    assert layer.panels.dtype == torch.float32


@pytest.mark.parametrize(
    "dtype, most",
    [(torch.bfloat16, 4e-3), (torch.float16, 1e-3), (torch.float32, 1e-6), (torch.float64, 1e-14)],
)
def test_the_mean_square_of_16_bits_is_taken_in_32(dtype, most):
    """Squares of half precision overflow in it; a float64 model stays in 64 bits."""
    x, norm = torch.full((1, 4096), 300.0, dtype=dtype), RMSNorm(4096, 0.0)
    norm.weight.data = torch.ones(4096, dtype=dtype)
    assert (norm(x) - 1).abs().max() <= most
