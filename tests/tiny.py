"""Tiny random checkpoints on disk, for tests: config.json as a dict, tensors by their published names.

Shapes are written out from the config.json alone, not from the model, so that a loading test can disagree.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

TEMPLATE = (  # of a chat: shows all it is given
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if enable_thinking %}<think>{% endif %}"
)


def tiny_target_config(**changes) -> dict:
    """config.json of a LLaMA-family target: 2 layers, hidden 32, 4 heads on 2, head_dim 16 (not 32 / 4)."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "eos_token_id": None,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "mlp_bias": False,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 256,
    }
    return config | changes


def tiny_draft_config(**changes) -> dict:
    """config.json of a DFlash head for `tiny_target_config`: 1 layer, block 8, both target layers tapped."""
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "block_size": 8,
        "dflash_config": {"mask_token_id": 255, "target_layer_ids": [0, 1]},
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 48,
        "layer_types": ["full_attention"],
        "max_position_embeddings": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "num_target_layers": 2,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 256,
    }
    return config | changes


def random_tensors(config: dict, seed: int = 0) -> dict[str, Tensor]:
    """Random float32 tensors of a checkpoint with this config.json, by published name."""
    generator = torch.Generator().manual_seed(seed)
    draft = "dflash_config" in config
    hidden, middle, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    tensors = {}

    def matrix(name: str, rows: int, columns: int, bias: bool = False):
        tensors[f"{name}.weight"] = torch.randn(rows, columns, generator=generator) / columns**0.5
        if bias:
            tensors[f"{name}.bias"] = torch.randn(rows, generator=generator) * 0.1

    def norm(name: str, size: int):
        tensors[f"{name}.weight"] = 1 + 0.1 * torch.randn(size, generator=generator)

    prefix = "" if draft else "model."
    if draft:
        matrix("fc", hidden, len(config["dflash_config"]["target_layer_ids"]) * hidden)
        norm("hidden_norm", hidden)
    else:
        tensors["model.embed_tokens.weight"] = torch.randn(config["vocab_size"], hidden, generator=generator)
        if not config.get("tie_word_embeddings"):
            matrix("lm_head", config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer, bias = f"{prefix}layers.{index}", config.get("attention_bias", False)
        norm(f"{layer}.input_layernorm", hidden)
        norm(f"{layer}.post_attention_layernorm", hidden)
        matrix(f"{layer}.self_attn.q_proj", queries, hidden, bias)
        matrix(f"{layer}.self_attn.k_proj", keys, hidden, bias)
        matrix(f"{layer}.self_attn.v_proj", keys, hidden, bias)
        matrix(f"{layer}.self_attn.o_proj", hidden, queries, bias)
        if config["model_type"] == "qwen3":
            norm(f"{layer}.self_attn.q_norm", head_dim)
            norm(f"{layer}.self_attn.k_norm", head_dim)
        matrix(f"{layer}.mlp.gate_proj", middle, hidden, config.get("mlp_bias", False))
        matrix(f"{layer}.mlp.up_proj", middle, hidden, config.get("mlp_bias", False))
        matrix(f"{layer}.mlp.down_proj", hidden, middle, config.get("mlp_bias", False))
    norm(f"{prefix}norm", hidden)
    return tensors


def write_checkpoint(directory: Path, tensors: dict[str, Tensor], config: dict, shards: int = 1) -> Path:
    """Write config.json and the tensors, in one file or dealt out to `shards` files under an index."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[shard::shards])  # neighbours apart: pieces of a fused parameter too
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def write_tiny_target(directory: Path, seed: int = 0, shards: int = 1, **changes) -> Path:
    """A random target on disk; `changes` go into its config.json."""
    config = tiny_target_config(**changes)
    return write_checkpoint(directory, random_tensors(config, seed), config, shards)


def write_tiny_draft(directory: Path, seed: int = 1, **changes) -> Path:
    """A random DFlash head for `write_tiny_target` on disk; `changes` go into its config.json."""
    config = tiny_draft_config(**changes)
    return write_checkpoint(directory, random_tensors(config, seed), config)


def write_byte_tokenizer(directory: Path, template: str = TEMPLATE) -> None:
    """A tokenizer of 256 tokens, one a byte, and a chat template."""
    # Byte-level BPE writes each byte as one printable character: itself where it is one, else from 256 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": {letters[byte]: byte for byte in range(256)}, "merges": []}
    around = {"pre_tokenizer": byte_level, "decoder": byte_level}
    tokenizer = {"version": "1.0", "added_tokens": [], **around, "model": model}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
