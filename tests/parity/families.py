"""Tiny random models, one a variant, saved as MLX folders that mlx-lm and galley both load."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models import llama
from mlx_lm.utils import load_model

VOCAB = 256

LLAMA = dict(
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    hidden_size=64,
    num_hidden_layers=3,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    rms_norm_eps=1e-6,
    vocab_size=VOCAB,
    rope_theta=1e4,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
    eos_token_id=VOCAB - 1,
    bos_token_id=1,
)

LLAMA3_ROPE = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)


@dataclass
class Variant:
    name: str
    dtype: mx.Dtype
    config: dict = field(default_factory=dict)
    bits: int = 0  # 0: unquantized
    group: int = 64
    mixed: dict = field(default_factory=dict)  # layer path suffix -> (bits, group)


VARIANTS = [
    Variant("tied f32", mx.float32),
    Variant("untied f32", mx.float32, dict(tie_word_embeddings=False)),
    Variant("tied bf16", mx.bfloat16),
    Variant("untied bf16, 8 q : 1 kv", mx.bfloat16,
            dict(tie_word_embeddings=False, num_attention_heads=8, num_key_value_heads=1, head_dim=16)),
    Variant("untied f16, no GQA", mx.float16, dict(tie_word_embeddings=False, num_key_value_heads=4)),
    Variant("bf16, attention bias, llama3 rope", mx.bfloat16,
            dict(attention_bias=True, rope_theta=5e5, rope_scaling=LLAMA3_ROPE)),
    Variant("f32, linear rope, traditional", mx.float32,
            dict(rope_traditional=True, rope_scaling=dict(type="linear", factor=4.0))),
    Variant("tied bf16, 4-bit g32", mx.bfloat16, bits=4, group=32),
    Variant("untied bf16, 4-bit g64", mx.bfloat16, dict(tie_word_embeddings=False), bits=4, group=64),
    Variant("tied f32, 4-bit g64", mx.float32, bits=4, group=64),
    Variant("untied f16, 4-bit g32, one layer", mx.float16, dict(tie_word_embeddings=False, num_hidden_layers=1), bits=4,
            group=32),
    Variant("tied bf16, 8-bit g64", mx.bfloat16, bits=8, group=64),
    Variant("untied bf16, 4-bit g64, head and down 8-bit g32, attention bias", mx.bfloat16,
            dict(tie_word_embeddings=False, attention_bias=True), bits=4, group=64,
            mixed={"lm_head": (8, 32), "mlp.down_proj": (8, 32)}),
    Variant("tied bf16, 6-bit g64", mx.bfloat16, bits=6, group=64),
]


def _randomize(path, value):
    """Norm weights of one and biases of zero would hide mistakes."""
    if "norm" in path:
        return 1.0 + 0.25 * mx.random.normal(value.shape)
    if path.endswith(".bias"):
        return 0.1 * mx.random.normal(value.shape)
    if "embed" in path:
        return mx.random.normal(value.shape)
    return 3.0 * value


def build(variant: Variant, folder: Path) -> None:
    """Writes `variant` into `folder`: config.json and model.safetensors, as mlx-lm's converter lays them out."""
    config = dict(LLAMA, **variant.config)
    mx.random.seed(7)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    model.update(tree_map_with_path(_randomize, model.parameters()))
    model.set_dtype(variant.dtype)
    if variant.bits:
        quantization = dict(group_size=variant.group, bits=variant.bits, mode="affine")

        def choose(path, module):
            if not hasattr(module, "to_quantized"):
                return False
            for suffix, (bits, group) in variant.mixed.items():
                if path.endswith(suffix):
                    quantization[path] = dict(group_size=group, bits=bits)
                    return dict(group_size=group, bits=bits)
            return True

        nn.quantize(model, variant.group, variant.bits, class_predicate=choose)
        config["quantization"] = config["quantization_config"] = quantization
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())),
                        metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    # Loading a folder wants a tokenizer; the scripts speak in ids.
    vocabulary = {f"<{token}>": token for token in range(VOCAB)}
    (folder / "tokenizer.json").write_text(json.dumps(dict(
        version="1.0", added_tokens=[], model=dict(type="WordLevel", vocab=vocabulary, unk_token="<0>"))))


def load(folder: Path):
    model, _ = load_model(folder)
    return model
