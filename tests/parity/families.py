"""Tiny random models, one a variant, saved as MLX folders that mlx-lm and galley both load."""

import importlib
import json
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import load_model

VOCAB = 256

# What all the tiny models have.
TINY = dict(
    hidden_size=64,
    num_hidden_layers=4,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    rms_norm_eps=1e-6,
    vocab_size=VOCAB,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
    eos_token_id=VOCAB - 1,
    bos_token_id=1,
)

LLAMA = dict(TINY, model_type="llama", architectures=["LlamaForCausalLM"], num_hidden_layers=3, rope_theta=1e4)

LLAMA3_ROPE = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)

# In MiniCPM5-1B's proportions: many query heads on few of keys and values, wider than the hidden state.
MINICPM5 = dict(LLAMA, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=2, head_dim=16, rope_theta=1e6,
                max_position_embeddings=131072, tie_word_embeddings=False)

QWEN2 = dict(LLAMA, model_type="qwen2", architectures=["Qwen2ForCausalLM"], num_hidden_layers=2, rope_theta=1e6)
QWEN3 = dict(LLAMA, model_type="qwen3", architectures=["Qwen3ForCausalLM"], num_hidden_layers=2, rope_theta=1e6,
             head_dim=32)

QWEN3_MOE = dict(
    QWEN3,
    model_type="qwen3_moe",
    architectures=["Qwen3MoeForCausalLM"],
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    norm_topk_prob=True,
)

# Two layers that slide to one that doesn't.
SLIDING = dict(TINY, head_dim=16, sliding_window=16, sliding_window_pattern=3)

GEMMA3 = dict(SLIDING, model_type="gemma3_text", architectures=["Gemma3ForCausalLM"], rope_theta=1e6,
              rope_local_base_freq=1e4, query_pre_attn_scalar=24)

# Gemma 4 in its three shapes. Heads of full layers are larger than those of sliding ones.
GEMMA4 = dict(
    SLIDING,
    model_type="gemma4_text",
    architectures=["Gemma4ForCausalLM"],
    num_global_key_value_heads=1,
    attention_k_eq_v=True,
    global_head_dim=32,
    vocab_size_per_layer_input=VOCAB,
    hidden_size_per_layer_input=0,
    num_kv_shared_layers=0,
    use_double_wide_mlp=False,
    final_logit_softcapping=3.0,  # of the size of these models' logits, so that it bends them
)

# Of its six layers (two sliding, one full, twice) the last three read the keys and values of the first three.
E4B = dict(GEMMA4, num_hidden_layers=6, attention_k_eq_v=False, hidden_size_per_layer_input=32, num_kv_shared_layers=3,
           use_double_wide_mlp=True)

GEMMA4_MOE = dict(GEMMA4, num_hidden_layers=3, enable_moe_block=True, num_experts=8, top_k_experts=2,
                  moe_intermediate_size=64)

BASES = ({base["model_type"]: base for base in (LLAMA, QWEN2, QWEN3, QWEN3_MOE)}
         | {"minicpm5": MINICPM5, "gemma3": GEMMA3, "gemma4": GEMMA4, "e4b": E4B, "moe": GEMMA4_MOE})


@dataclass
class Variant:
    name: str
    dtype: mx.Dtype
    config: dict = field(default_factory=dict)  # over the family's base
    bits: int = 0  # 0: unquantized
    group: int = 64
    mixed: dict = field(default_factory=dict)  # layer path suffix -> (bits, group)
    family: str = "llama"
    brief: bool = False  # other variants, mostly of the family, run the cases that this one leaves out
    lean: bool = False  # runs fewer still
    reuse: bool = False  # brief or lean, with a prompt cache all the same
    published: bool = False  # tensors have the names that Gemma's makers give them; mlx-lm renames them as it loads
    kv_quant: str = "off"  # or 8, 4, config: then the oracle is mlx-optiq
    kv_config: list = field(default_factory=list)  # (layer, bits, group) for the model's kv_config.json

    @property
    def kv_group(self):
        """Of every layer, where kv_quant says how many bits."""
        config = text_config_of(self)
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return 64 if head_dim % 64 == 0 else 32


VARIANTS = [
    Variant("tied f32", mx.float32),
    Variant("untied f32", mx.float32, dict(tie_word_embeddings=False), brief=True),
    Variant("tied bf16", mx.bfloat16, brief=True),
    Variant("untied bf16, 8 q : 1 kv", mx.bfloat16,
            dict(tie_word_embeddings=False, num_attention_heads=8, num_key_value_heads=1, head_dim=16)),
    Variant("untied f16, no GQA", mx.float16, dict(tie_word_embeddings=False, num_key_value_heads=4)),
    Variant("bf16, attention bias, llama3 rope", mx.bfloat16,
            dict(attention_bias=True, rope_theta=5e5, rope_scaling=LLAMA3_ROPE), brief=True),
    Variant("f32, linear rope, traditional", mx.float32,
            dict(rope_traditional=True, rope_scaling=dict(type="linear", factor=4.0)), brief=True),
    Variant("tied bf16, 4-bit g32", mx.bfloat16, bits=4, group=32, brief=True),
    Variant("untied bf16, 4-bit g64", mx.bfloat16, dict(tie_word_embeddings=False), bits=4, group=64),
    Variant("tied f32, 4-bit g64", mx.float32, bits=4, group=64, brief=True),
    Variant("untied f16, 4-bit g32, one layer", mx.float16, dict(tie_word_embeddings=False, num_hidden_layers=1), bits=4,
            group=32, brief=True),
    Variant("tied bf16, 8-bit g64", mx.bfloat16, bits=8, group=64, brief=True),
    Variant("untied bf16, 4-bit g64, head and down 8-bit g32, attention bias", mx.bfloat16,
            dict(tie_word_embeddings=False, attention_bias=True), bits=4, group=64,
            mixed={"lm_head": (8, 32), "mlp.down_proj": (8, 32)}, brief=True),
    Variant("tied bf16, 6-bit g64", mx.bfloat16, bits=6, group=64, brief=True),
    Variant("untied bf16", mx.bfloat16, family="minicpm5", brief=True),
    Variant("untied bf16, 4-bit g64", mx.bfloat16, bits=4, group=64, family="minicpm5", brief=True),
    Variant("tied f32", mx.float32, family="qwen2", brief=True),
    Variant("untied bf16, linear rope", mx.bfloat16,
            dict(tie_word_embeddings=False, rope_scaling=dict(type="linear", factor=2.0)), family="qwen2", brief=True),
    Variant("tied bf16, 4-bit g64", mx.bfloat16, bits=4, group=64, family="qwen2", brief=True, reuse=True),
    Variant("untied bf16, 4-bit g32, head and down 8-bit g64", mx.bfloat16, dict(tie_word_embeddings=False), bits=4,
            group=32, mixed={"lm_head": (8, 64), "mlp.down_proj": (8, 64)}, family="qwen2", brief=True),
    Variant("untied bf16, 8-bit g64", mx.bfloat16, dict(tie_word_embeddings=False), bits=8, group=64,
            family="qwen2", brief=True),
    Variant("untied f32", mx.float32, dict(tie_word_embeddings=False), family="qwen3", brief=True),
    Variant("tied bf16, 8 q : 1 kv", mx.bfloat16, dict(num_attention_heads=8, num_key_value_heads=1, head_dim=16),
            family="qwen3", brief=True),
    Variant("tied bf16, 4-bit g64", mx.bfloat16, bits=4, group=64, family="qwen3", brief=True, reuse=True),
    Variant("untied bf16, 8-bit g32", mx.bfloat16, dict(tie_word_embeddings=False), bits=8, group=32,
            family="qwen3", brief=True),
    Variant("tied bf16, 4-bit g64, v and down 6-bit g32", mx.bfloat16, bits=4, group=64,
            mixed={"v_proj": (6, 32), "mlp.down_proj": (6, 32)}, family="qwen3", brief=True),
    # Picks are sorted by expert from 64 on: with 2 a token in longer prompts only, with 8 also in decode at B = 8.
    Variant("untied f32", mx.float32, dict(tie_word_embeddings=False), family="qwen3_moe", brief=True),
    Variant("tied f32, 8 of 16, not normalized, every other layer", mx.float32,
            dict(num_experts=16, num_experts_per_tok=8, norm_topk_prob=False, decoder_sparse_step=2, num_hidden_layers=4,
                 mlp_only_layers=[3]), family="qwen3_moe", brief=True),
    Variant("untied bf16, 4-bit g64, router 8-bit", mx.bfloat16, dict(tie_word_embeddings=False), bits=4, group=64,
            mixed={"mlp.gate": (8, 64)}, family="qwen3_moe", brief=True, reuse=True),
    Variant("tied bf16, 8-bit g32, 8 of 16", mx.bfloat16, dict(num_experts=16, num_experts_per_tok=8), bits=8, group=32,
            family="qwen3_moe", brief=True),
    Variant("tied f32", mx.float32, family="gemma3"),
    Variant("tied bf16", mx.bfloat16, family="gemma3", brief=True),
    Variant("untied f16, no GQA, window 5", mx.float16,
            dict(tie_word_embeddings=False, num_key_value_heads=4, sliding_window=5), family="gemma3", brief=True),
    Variant("tied bf16, 8 q : 1 kv, 3 sliding : 1 full", mx.bfloat16,
            dict(num_attention_heads=8, num_key_value_heads=1, sliding_window_pattern=4), family="gemma3", brief=True),
    Variant("tied f32, linear rope, every other layer sliding", mx.float32,
            dict(rope_scaling=dict(rope_type="linear", factor=8.0), sliding_window_pattern=2), family="gemma3", brief=True),
    Variant("tied bf16, 4-bit g32", mx.bfloat16, bits=4, group=32, family="gemma3", brief=True, reuse=True),
    Variant("tied bf16, 4-bit g64, q and down 8-bit g32", mx.bfloat16, bits=4, group=64,
            mixed={"q_proj": (8, 32), "mlp.down_proj": (8, 32)}, family="gemma3", lean=True),
    Variant("tied bf16, 8-bit g64", mx.bfloat16, bits=8, group=64, family="gemma3", lean=True),
    Variant("tied bf16, 4-bit g64, beside a vision tower", mx.bfloat16,
            dict(model_type="gemma3", text_config={key: value for key, value in GEMMA3.items() if key != "vocab_size"}),
            bits=4, group=64, family="gemma3", lean=True),
    Variant("tied f32", mx.float32, family="gemma4", lean=True),
    Variant("tied bf16", mx.bfloat16, family="gemma4", lean=True, reuse=True),
    Variant("untied bf16, 8-bit g64, values of their own, every other layer sliding", mx.bfloat16,
            dict(tie_word_embeddings=False, attention_k_eq_v=False, global_head_dim=0, final_logit_softcapping=None,
                 layer_types=["sliding_attention", "full_attention"] * 2), bits=8, group=64, family="gemma4", lean=True),
    Variant("tied bf16, 4-bit g64, q and down 8-bit g32, beside towers", mx.bfloat16,
            dict(model_type="gemma4", text_config=dict(GEMMA4)), bits=4, group=64,
            mixed={"q_proj": (8, 32), "mlp.down_proj": (8, 32)}, family="gemma4", lean=True),
    Variant("tied f32", mx.float32, family="e4b", lean=True, reuse=True),
    Variant("tied bf16, no GQA, MLPs alike", mx.bfloat16, dict(use_double_wide_mlp=False, num_key_value_heads=4),
            family="e4b", lean=True),
    Variant("tied bf16, 4-bit g32, per-layer embedding 8-bit", mx.bfloat16, bits=4, group=32,
            mixed={"embed_tokens_per_layer": (8, 32)}, family="e4b", lean=True),
    # As with qwen3_moe: picks are sorted from 64 on, with 8 a token also in decode at B = 8.
    Variant("tied f32, beside towers, named as published", mx.float32,
            dict(model_type="gemma4", text_config=dict(GEMMA4_MOE)), family="moe", lean=True, published=True),
    Variant("tied bf16, 4-bit g64, router 8-bit", mx.bfloat16, bits=4, group=64, mixed={"router.proj": (8, 64)},
            family="moe", lean=True, reuse=True),
    Variant("tied bf16, 8-bit g32, 8 of 16", mx.bfloat16, dict(num_experts=16, top_k_experts=8), bits=8, group=32,
            family="moe", lean=True),
    Variant("tied bf16, KV 8-bit g64", mx.bfloat16, dict(head_dim=64), kv_quant="8", reuse=True),
    Variant("untied bf16, 4-bit g64, KV 4-bit g64", mx.bfloat16, dict(head_dim=128, tie_word_embeddings=False), bits=4,
            group=64, kv_quant="4", brief=True),
    Variant("tied f32, no GQA, KV 4-bit g32", mx.float32, dict(head_dim=32, num_key_value_heads=4), kv_quant="4", brief=True),
    Variant("tied f16, 8 q : 1 kv, KV 4-bit g64, plain, 8-bit g32", mx.float16,
            dict(num_attention_heads=8, num_key_value_heads=1, head_dim=64), kv_quant="config",
            kv_config=[(0, 4, 64), (2, 8, 32)], brief=True),
    Variant("untied bf16, KV 4-bit g64", mx.bfloat16, dict(head_dim=64), family="minicpm5", kv_quant="4", brief=True),
    Variant("tied bf16, KV 8-bit g32", mx.bfloat16, dict(num_attention_heads=2, num_key_value_heads=1), family="qwen2",
            kv_quant="8", brief=True),
    Variant("untied f32, KV 4-bit g64, plain", mx.float32, dict(head_dim=64, tie_word_embeddings=False), family="qwen3",
            kv_quant="config", kv_config=[(0, 4, 64)], brief=True),
    Variant("tied bf16, 4-bit g64, KV 8-bit g64", mx.bfloat16, dict(head_dim=64), bits=4, group=64, family="qwen3_moe",
            kv_quant="8", brief=True),
    Variant("tied bf16, KV 8-bit g64", mx.bfloat16, dict(head_dim=64), family="gemma3", kv_quant="8", reuse=True),
    Variant("tied f32, 4-bit g32, 8 q : 1 kv, KV 4-bit g32", mx.float32,
            dict(head_dim=32, num_attention_heads=8, num_key_value_heads=1), bits=4, group=32, family="gemma3",
            kv_quant="4"),
    Variant("tied bf16, 3 sliding : 1 full, KV 4-bit g64, plain, 8-bit g32, 8-bit g64", mx.bfloat16,
            dict(head_dim=64, sliding_window_pattern=4), family="gemma3", kv_quant="config",
            kv_config=[(0, 4, 64), (2, 8, 32), (3, 8, 64)]),
    Variant("tied bf16, KV 8-bit g64", mx.bfloat16, dict(head_dim=64, global_head_dim=128), family="gemma4", kv_quant="8"),
    Variant("tied f32, KV 4-bit g32", mx.float32, dict(head_dim=32), family="e4b", kv_quant="4", reuse=True),
    Variant("tied bf16, 4-bit g32, KV 8-bit g64, plain, 4-bit g32", mx.bfloat16, dict(head_dim=64), bits=4, group=32,
            family="e4b", kv_quant="config", kv_config=[(0, 8, 64), (2, 4, 32)]),
    Variant("tied bf16, 4-bit g64, KV plain, 4-bit g64, 8-bit g64", mx.bfloat16, dict(head_dim=64, global_head_dim=64),
            bits=4, group=64, family="moe", kv_quant="config", kv_config=[(1, 4, 64), (2, 8, 64)]),
]


def _randomize(path, value, family):
    """Norm weights of one and biases of zero would hide mistakes."""
    if "norm" in path or path.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
        return (0.0 if family.startswith("gemma3") else 1.0) + 0.25 * mx.random.normal(value.shape)
    if path.endswith(".bias"):
        return 0.1 * mx.random.normal(value.shape)
    if "embed" in path:
        return mx.random.normal(value.shape)
    return 3.0 * value


def config_of(variant: Variant) -> dict:
    return dict(BASES[variant.family], **variant.config)


def text_config_of(variant: Variant) -> dict:
    """What says how the text model is made, beside towers too."""
    config = config_of(variant)
    return config | config.get("text_config", {})


def _published(weights: dict) -> dict:
    """The text model inside "model.", and the experts' gates above their ups in one tensor."""
    renamed = {}
    for name, value in weights.items():
        if name.endswith("switch_glu.up_proj.weight"):
            continue
        if name.endswith("switch_glu.gate_proj.weight"):
            value = mx.concatenate([value, weights[name.replace("gate_proj", "up_proj")]], axis=-2)
        name = name.replace("language_model.model.", "model.language_model.")
        name = name.replace("switch_glu.gate_proj.weight", "gate_up_proj")
        renamed[name.replace("switch_glu.down_proj.weight", "down_proj")] = value
    return renamed


def build(variant: Variant, folder: Path) -> None:
    """Writes `variant` into `folder`: config.json and model.safetensors, as mlx-lm's converter lays them out, and the
    kv_config.json that mlx-optiq adds."""
    config = config_of(variant)
    mx.random.seed(7)
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    text = getattr(model, "language_model", model)
    if config["tie_word_embeddings"] and "lm_head" in text:  # families that tell a tied head by its absence
        text.sanitize({})
    model.update(tree_map_with_path(lambda path, value: _randomize(path, value, variant.family), model.parameters()))
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
    weights = dict(tree_flatten(model.parameters()))
    if variant.published:
        weights = _published(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights,
                        metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    if variant.kv_config:
        (folder / "kv_config.json").write_text(json.dumps(
            [dict(layer_idx=layer, bits=bits, group_size=group) for layer, bits, group in variant.kv_config]))
    # Loading a folder wants a tokenizer; the scripts speak in ids.
    vocabulary = {f"<{token}>": token for token in range(VOCAB)}
    (folder / "tokenizer.json").write_text(json.dumps(dict(
        version="1.0", added_tokens=[], model=dict(type="WordLevel", vocab=vocabulary, unk_token="<0>"))))


def load(folder: Path):
    model, _ = load_model(folder)
    return model
