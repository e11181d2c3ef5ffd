"""config.json: every accepted form means the same, every form that is not computed is refused by its name."""

import json
import re

import pytest
from tiny import tiny_draft_config, tiny_target_config

from model.config import Rope, check_pair, draft_config, read_config, target_config
from model.errors import UserError

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}


def without(config: dict, *names: str) -> dict:
    return {name: value for name, value in config.items() if name not in names}


def refusal(parse, config: dict) -> str:
    """The message of the error that `parse` raises: one line, led by the place."""
    with pytest.raises(UserError) as caught:
        parse(config, "somewhere")
    message = str(caught.value)
    assert message.startswith("somewhere: ") and "\n" not in message
    return message


def test_target_fields():
    config = target_config(
        tiny_target_config(tie_word_embeddings=True, attention_bias=True)
    )
    assert (config.family, config.qk_norm, config.tied) == ("llama", False, True)
    assert (config.vocab_size, config.hidden, config.intermediate, config.layers) == (256, 32, 48, 2)
    assert (config.heads, config.kv_heads, config.head_dim, config.context) == (4, 2, 16, 64)
    assert (config.eps, config.attention_bias, config.mlp_bias) == (1e-5, True, False)
    qwen3 = target_config(tiny_target_config(model_type="qwen3", architectures=["Qwen3ForCausalLM"]))
    assert (qwen3.family, qwen3.qk_norm) == ("qwen3", True)


@pytest.mark.parametrize("written, read", [(16, 16), (None, 8), ("absent", 8)])
def test_head_dim_is_read_before_it_is_derived(written, read):
    """hidden / heads is right for many models and wrong for Qwen3; null means absent."""
    config = (
        without(tiny_target_config(), "head_dim")
        if written == "absent"
        else tiny_target_config(head_dim=written)
    )
    assert target_config(config).head_dim == read


def test_absent_settings_take_the_families_common_default():
    """Multi-head attention, no biases, theta 10000, and no word on tying."""
    names = (
        "num_key_value_heads",
        "attention_bias",
        "mlp_bias",
        "rope_theta",
        "rms_norm_eps",
        "tie_word_embeddings",
        "architectures",
    )
    config = target_config(without(tiny_target_config(), *names))
    assert (config.kv_heads, config.attention_bias, config.mlp_bias) == (4, False, False)
    assert (config.rope, config.eps, config.tied) == (Rope(10000.0), 1e-6, None)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 500000},
        {"rope_theta": 5e5, "rope_scaling": None, "rope_parameters": None},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "default"}},
        {"rope_theta": 5e5, "original_max_position_embeddings": 32},
        {"rope_parameters": {"rope_theta": 5e5}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default", "partial_rotary_factor": 1.0}},
        {"rope_theta": 1.0, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    ],
)
def test_rope_theta_flat_or_nested(rope):
    """Both forms of transformers, and both at once: reading only one gives another theta, and babble."""
    config = without(tiny_target_config(), "rope_theta") | rope
    assert target_config(config).rope == Rope(5e5)


@pytest.mark.parametrize(
    "settings, expected",
    [
        (LLAMA3 | {"rope_type": "llama3"}, Rope(1e4, "llama3", 8.0, 1.0, 4.0, original_context=32)),
        (YARN | {"rope_type": "yarn"}, Rope(1e4, "yarn", 4.0, original_context=32, beta_fast=32.0, beta_slow=1.0)),
        (
            YARN
            | {
                "rope_type": "yarn",
                "beta_fast": 16,
                "beta_slow": 2,
                "attention_factor": 1.5,
                "truncate": True,
            },
            Rope(1e4, "yarn", 4.0, original_context=32, beta_fast=16.0, beta_slow=2.0, attention_factor=1.5),
        ),
        ({"rope_type": "yarn", "factor": 2.0}, Rope(1e4, "yarn", 2.0, original_context=64)),
    ],
)
def test_rope_scaling_in_three_forms(settings, expected):
    """Flat with `rope_type`, flat with the older `type`, nested: the same setting, so the same angles."""
    older = {("type" if name == "rope_type" else name): value for name, value in settings.items()}
    stretched = "original_max_position_embeddings"
    for form in (
        {"rope_scaling": settings},
        {"rope_scaling": older},
        {"rope_theta": 7.0, "rope_parameters": settings | {"rope_theta": 1e4}},
        {"rope_scaling": settings, "rope_parameters": settings},
        {"rope_scaling": without(settings, stretched), **{name: settings[name] for name in [stretched] if name in settings}},
    ):
        assert target_config(tiny_target_config(**form)).rope == expected
    assert draft_config(tiny_draft_config(rope_scaling=settings, max_position_embeddings=64)).rope == expected


def test_yarn_stretches_a_context_that_config_left_short():
    """Qwen3's cards add yarn by hand and leave max_position_embeddings: the stretch would be out of reach."""
    assert target_config(tiny_target_config(rope_scaling=YARN | {"rope_type": "yarn"})).context == 128
    stretched = tiny_target_config(rope_scaling=YARN | {"rope_type": "yarn"}, max_position_embeddings=4096)
    assert target_config(stretched).context == 4096
    llama3 = tiny_target_config(rope_scaling=LLAMA3 | {"rope_type": "llama3"})
    assert target_config(llama3).context == 64


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "'longrope'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "'dynamic'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, "'linear'"),
        ({"rope_scaling": YARN | {"rope_type": "yarn", "mscale": 0.7}}, "mscale"),
        ({"rope_scaling": YARN | {"rope_type": "yarn", "truncate": False}}, "truncate"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor is missing"),
        (
            {"rope_scaling": without(LLAMA3, "low_freq_factor") | {"rope_type": "llama3"}},
            "low_freq_factor is missing",
        ),
        ({"rope_scaling": LLAMA3 | {"rope_type": "llama3", "high_freq_factor": 1.0}}, "high_freq_factor"),
        (
            {"rope_scaling": YARN | {"type": "yarn"}, "rope_parameters": {"rope_type": "default"}},
            "rope_type is 'yarn' in one place and 'default' in another: keep one of them",
        ),
        ({"rope_scaling": YARN | {"type": "yarn"}, "rope_parameters": YARN | {"type": "yarn", "factor": 2.0}}, "factor is"),
        ({"rope_scaling": {"type": "yarn", "rope_type": "default"}}, "rope_type is 'yarn' in one place"),
        ({"rope_scaling": YARN | {"type": "yarn"}, "original_max_position_embeddings": 16}, "is 32 in one place and 16"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be a JSON object"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "\"['yarn']\" is not supported"),
        ({"rope_theta": 0}, "rope_theta must be a positive number"),
        ({"rope_theta": 10**400}, "rope_theta must be a positive number between 1e-30 and 1e30"),
        ({"rope_theta": 1e-320}, "rope_theta must be a positive number between 1e-30 and 1e30"),
        ({"rope_scaling": YARN | {"rope_type": "yarn", "beta_slow": 1e-320}}, "beta_slow must be a positive number between 1e-30 and"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a positive number between 1e-30 and 1e30"),
        ({"rope_scaling": YARN | {"rope_type": "yarn", "factor": 1e308}}, "factor must be a positive number between 1e-30 and 1e30"),
        ({"rope_scaling": YARN | {"rope_type": "yarn", "beta_fast": 1e308}}, "beta_fast must be a positive number"),
        ({"rope_scaling": YARN | {"rope_type": "yarn"}, "rope_theta": 1}, "rope_theta must be above 1, not 1.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM"),
        ({"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}, "'qwen3_next'"),
        ({"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}, "'gemma3'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "'llama' (Qwen3ForCausalLM)"),
        ({"model_type": None}, "model type None"),
        ({"model_type": ["llama"]}, "model type ['llama']"),
        ({"architectures": [1]}, "'llama' (1)"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list"),
        ({"layer_types": 3}, "layer_types must be a list"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config (gptq)"),
        ({"quantization_config": {"bits": 4}}, "quantization_config (no quant_method)"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "'linear_attention'"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "'sliding_attention'"),
        ({"sliding_window": 32, "use_sliding_window": True}, "sliding_window 32"),
        ({"sliding_window": 32}, "sliding_window 32"),
        ({"attention_sinks": True}, "attention_sinks"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is not supported: only None is"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"logit_scale": 0.0625}, "logit_scale 0.0625 is not supported: only 1.0 is"),
        ({"logits_scaling": 8.0}, "logits_scaling"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier"),
        ({"residual_multiplier": 0.22}, "residual_multiplier"),
        ({"attention_multiplier": 0.015}, "attention_multiplier"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"hidden_size": "32"}, "hidden_size must be a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number of at least 1"),
        ({"head_dim": 2**70}, "head_dim must be a whole number of at least 1 and below 2147483648"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be a whole number of at least 1 and below 10000"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
        ({"rms_norm_eps": True}, "rms_norm_eps must be a positive number"),
        ({"rope_theta": float("inf")}, "rope_theta must be a positive number"),
        ({"attention_bias": "no"}, "attention_bias must be true or false"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"head_dim": None, "num_attention_heads": 6}, "head_dim is missing"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
    ],
)
def test_target_refusals_name_their_cause(changes, named):
    """A setting that is read over gives a model that runs and is wrong."""
    assert named in refusal(target_config, tiny_target_config(**changes))


def test_a_window_that_is_switched_off_is_no_window():
    """Qwen3 configs keep the window's size beside `use_sliding_window: false`."""
    qwen3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "sliding_window": 4096}
    target_config(tiny_target_config(**qwen3))
    target_config(tiny_target_config(**qwen3, use_sliding_window=False, layer_types=["full_attention"] * 2))
    draft_config(tiny_draft_config(sliding_window=4096))


def test_draft_fields_flat_and_nested():
    """block_size stands at the top or under dflash_config; the nested one wins."""
    config = draft_config(tiny_draft_config())
    assert (config.block_size, config.taps, config.mask_token_id, config.target_layers) == (8, (0, 1), 255, 2)
    assert config.qk_norm and config.context == 128
    nested = {"mask_token_id": 255, "target_layer_ids": [0, 1], "block_size": 10}
    assert draft_config(tiny_draft_config(dflash_config=nested)).block_size == 10
    assert draft_config(without(tiny_draft_config(dflash_config=nested), "block_size")).block_size == 10
    assert draft_config(without(tiny_draft_config(), "num_target_layers")).target_layers is None
    off = {"mask_token_id": 0, "target_layer_ids": [0], "fc_layernorm": False}  # the first id, and a variant that is not used
    assert draft_config(tiny_draft_config(dflash_config=off)).mask_token_id == 0


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"dflash_config": {"mask_token_id": 255}}, "target_layer_ids is missing"),
        ({"dflash_config": {"mask_token_id": 255, "target_layer_ids": []}}, "target_layer_ids must be"),
        ({"dflash_config": {"mask_token_id": 255, "target_layer_ids": [-1]}}, "target_layer_ids must be"),
        ({"dflash_config": {"mask_token_id": 255, "target_layer_ids": [True]}}, "target_layer_ids must be"),
        ({"dflash_config": {"mask_token_id": -1, "target_layer_ids": [0]}}, "mask_token_id must be a whole number of at least 0"),
        ({"dflash_config": {"target_layer_ids": [0, 1]}}, "mask_token_id is missing"),
        ({"dflash_config": None}, "target_layer_ids is missing"),
        ({"block_size": None}, "block_size is missing"),
        ({"block_size": 1}, "block_size must be a whole number of at least 2"),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
        ({"architectures": None}, "without an architecture"),
        ({"model_type": "gpt_oss"}, "'gpt_oss'"),
        ({"layer_types": ["sliding_attention"]}, "'sliding_attention'"),
        ({"sliding_window": 2048, "use_sliding_window": True}, "sliding_window 2048"),
        ({"draft_vocab_size": 32}, "draft_vocab_size 32"),
        ({"attention_sinks": 4}, "attention_sinks"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config (fp8)"),
        (
            {"dflash_config": {"mask_token_id": 255, "target_layer_ids": [0], "fc_layernorm": True}},
            "fc_layernorm",
        ),
    ],
)
def test_draft_refusals_name_their_cause(changes, named):
    """Taps are never guessed from a formula: another choice of layers loads, and only acceptance suffers."""
    assert named in refusal(draft_config, tiny_draft_config(**changes))


def test_swapped_paths_say_what_was_found():
    assert "this is a DFlash head" in refusal(target_config, tiny_draft_config())
    assert "this is a DFlash head" in refusal(
        target_config, tiny_draft_config(architectures=["DFlash2DraftModel"])
    )
    assert "this is a target, not a DFlash head" in refusal(draft_config, tiny_target_config())


@pytest.mark.parametrize(
    "draft, target, named",
    [
        ({"hidden_size": 64}, {}, "hidden size is 64, the target's 32"),
        ({}, {"num_hidden_layers": 3}, "a target of 2 layers, this one has 3"),
        (
            {"num_target_layers": None},
            {"num_hidden_layers": 1},
            "target layer 1 (target_layer_ids), the last one is 0",
        ),
        ({}, {"vocab_size": 255}, "mask_token_id is 255, the target's vocabulary 255"),
    ],
)
def test_a_head_for_another_target_is_refused(draft, target, named):
    """Each of these would run, or fail far from its cause, and none could be accepted."""
    target = target_config(tiny_target_config(**target))
    with pytest.raises(UserError, match=re.escape(named)):
        check_pair(draft_config(tiny_draft_config(**draft)), target)


def test_a_matching_pair_passes():
    check_pair(draft_config(tiny_draft_config()), target_config(tiny_target_config()))


@pytest.mark.parametrize("text", [None, "", "{", '{"a": 1', "[1]", b"\xff\xfe\x00", '{"a": ' + 99_999 * "["], ids=lambda text: repr(text)[:9])
def test_a_bad_config_file_is_named(tmp_path, text):
    """Absent, empty, cut, not an object, not text: one line with the path."""
    path = tmp_path / "config.json"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as caught:
        read_config(tmp_path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_read_config_gives_the_dict(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_target_config()))
    assert read_config(tmp_path) == tiny_target_config()
