// Gemma 4 as a GGUF file: the metadata and names that llama.cpp's converter gives it.
#pragma once
#include <string>
#include <vector>

#include "checkpoint_files.h"
#include "memory_checkpoint.h"

namespace galley::testing {

/// What a converter would not write: lists in the place of the right ones, unless empty.
struct Gemma4Oddities {
  std::vector<bool> sliding{};
  std::vector<std::int32_t> kv_heads{}, widths{};
};

/// The metadata of such a model, without tensors.
inline models::test::GgufWriter gemma4_metadata(const models::Config& c, const Gemma4Oddities& odd = {}) {
  models::test::GgufWriter out;
  const auto integer = [&](const std::string& key, int value) {
    out.integer("gemma4." + key, static_cast<std::uint32_t>(value));
  };
  out.string("general.architecture", "gemma4");
  integer("block_count", c.layers);
  integer("context_length", c.context);
  integer("embedding_length", c.hidden);
  integer("attention.head_count", c.heads);
  std::vector<bool> sliding;
  std::vector<std::int32_t> kv_heads, widths;
  for (int layer = 0; layer < c.layers; ++layer) {
    sliding.push_back(c.sliding.slides(layer));
    kv_heads.push_back(sliding.back() ? c.kv_heads : c.full.kv_heads);
    widths.push_back(c.intermediate * (c.shared_kv.double_wide_mlp && layer >= c.layers - c.shared_kv.layers ? 2 : 1));
  }
  if (!odd.sliding.empty()) sliding = odd.sliding;
  if (!odd.kv_heads.empty()) kv_heads = odd.kv_heads;
  if (!odd.widths.empty()) widths = odd.widths;
  out.integers("gemma4.attention.head_count_kv", kv_heads);
  if (c.shared_kv.double_wide_mlp || !odd.widths.empty()) {
    out.integers("gemma4.feed_forward_length", widths);
  } else {
    integer("feed_forward_length", c.intermediate);
  }
  integer("attention.sliding_window", c.sliding.window);
  out.booleans("gemma4.attention.sliding_window_pattern", sliding);
  integer("attention.shared_kv_layers", c.shared_kv.layers);
  integer("embedding_length_per_layer_input", c.per_layer.width);
  for (const char* key : {"attention.key_length", "attention.value_length", "rope.dimension_count"}) {
    integer(key, c.full.head_dim);
    integer(std::string(key) + "_swa", c.head_dim);
  }
  out.number("gemma4.attention.layer_norm_rms_epsilon", c.norm_eps);
  out.number("gemma4.rope.freq_base", c.rope_base);
  out.number("gemma4.rope.freq_base_swa", c.sliding.rope_base);
  out.number("gemma4.final_logit_softcapping", c.logit_softcap);
  if (c.experts.count > 0) {
    integer("expert_count", c.experts.count);
    integer("expert_used_count", c.experts.per_token);
    integer("expert_feed_forward_length", c.experts.intermediate);
  }
  std::vector<std::string> tokens;
  for (int i = 0; i < c.vocab; ++i) tokens.push_back("<" + std::to_string(i) + ">");
  out.string("tokenizer.ggml.model", "gemma4");
  out.strings("tokenizer.ggml.tokens", tokens);
  out.integers("tokenizer.ggml.token_type", std::vector<std::int32_t>(tokens.size(), 1));
  out.strings("tokenizer.ggml.merges", {});
  out.integer("tokenizer.ggml.eos_token_id", 0);
  return out;
}

/// Adds the tensors of a checkpoint, as plain f32.
class Gemma4Tensors {
 public:
  Gemma4Tensors(models::test::GgufWriter& out, const MemoryCheckpoint& from)
      : stops(static_cast<std::size_t>(from.config().full.head_dim / 2), 1e30F),
        out_(out),
        from_(from),
        c_(from.config()) {
    const auto turning = static_cast<std::ptrdiff_t>(c_.full.head_dim * c_.rope_scaling.rotated / 2);
    std::fill(stops.begin(), stops.begin() + turning, 1.0F);
  }

  std::vector<float> stops;  ///< what rope_freqs holds

  void write() {
    out_.tensor("rope_freqs.weight", {stops.size()}, 0, models::test::bytes_of(stops));
    matrix("token_embd", "model.embed_tokens", c_.vocab, c_.hidden);
    vector("output_norm.weight", "model.norm.weight", c_.hidden);
    if (!c_.tied_head) matrix("output", "lm_head", c_.vocab, c_.hidden);
    if (c_.per_layer.width > 0) {
      const int all = c_.layers * c_.per_layer.width;
      matrix("per_layer_token_embd", "model.embed_tokens_per_layer", c_.per_layer.vocab, all);
      matrix("per_layer_model_proj", "model.per_layer_model_projection", all, c_.hidden);
      vector("per_layer_proj_norm.weight", "model.per_layer_projection_norm.weight", c_.per_layer.width);
    }
    for (int layer = 0; layer < c_.layers; ++layer) write_layer(layer);
  }

 private:
  static std::uint64_t u64(int n) { return static_cast<std::uint64_t>(n); }
  void tensor(const std::string& name, const ops::MatrixSource& source, const std::vector<std::uint64_t>& shape) {
    std::string bytes;
    std::vector<float> row(static_cast<std::size_t>(source.cols()));
    for (int r = 0; r < source.rows(); ++r) {
      source.values(r, row);
      bytes += models::test::bytes_of(row);
    }
    out_.tensor(name, shape, 0, bytes);
  }
  void matrix(const std::string& name, const std::string& canonical, int rows, int cols) {
    tensor(name + ".weight", *from_.matrix(canonical + ".weight", rows, cols), {u64(rows), u64(cols)});
  }
  void vector(const std::string& name, const std::string& canonical, int size) {
    out_.tensor(name, {u64(size)}, 0, models::test::bytes_of(from_.vector(canonical, size).values));
  }

  void write_layer(int layer) {
    const std::string to = "blk." + std::to_string(layer) + ".";
    const std::string from = "model.layers." + std::to_string(layer) + ".";
    const auto norm = [&](const char* name, const char* canonical, int size) {
      vector(to + name + ".weight", from + canonical + ".weight", size);
    };
    const auto linear = [&](const char* name, const char* canonical, int rows, int cols) {
      matrix(to + name, from + canonical, rows, cols);
    };
    const bool slides = c_.sliding.slides(layer), owns = layer < c_.layers - c_.shared_kv.layers;
    const int head = slides ? c_.head_dim : c_.full.head_dim, q = c_.heads * head;
    const int kv = head * (slides ? c_.kv_heads : c_.full.kv_heads);
    norm("attn_norm", "input_layernorm", c_.hidden);
    norm("attn_q_norm", "self_attn.q_norm", head);
    norm("post_attention_norm", "post_attention_layernorm", c_.hidden);
    norm("ffn_norm", "pre_feedforward_layernorm", c_.hidden);
    norm("post_ffw_norm", "post_feedforward_layernorm", c_.hidden);
    vector(to + "layer_output_scale.weight", from + "layer_scalar", 1);
    linear("attn_q", "self_attn.q_proj", q, c_.hidden);
    linear("attn_output", "self_attn.o_proj", c_.hidden, q);
    if (owns) {
      norm("attn_k_norm", "self_attn.k_norm", head);
      linear("attn_k", "self_attn.k_proj", kv, c_.hidden);
      if (slides || !c_.full.keys_are_values) linear("attn_v", "self_attn.v_proj", kv, c_.hidden);
    }
    const int inner = c_.intermediate * (c_.shared_kv.double_wide_mlp && !owns ? 2 : 1);
    linear("ffn_gate", "mlp.gate_proj", inner, c_.hidden);
    linear("ffn_up", "mlp.up_proj", inner, c_.hidden);
    linear("ffn_down", "mlp.down_proj", c_.hidden, inner);
    if (c_.per_layer.width > 0) {
      linear("inp_gate", "per_layer_input_gate", c_.per_layer.width, c_.hidden);
      linear("proj", "per_layer_projection", c_.hidden, c_.per_layer.width);
      norm("post_norm", "post_per_layer_input_norm", c_.hidden);
    }
    if (c_.experts.count > 0) write_experts(to, from);
  }

  void write_experts(const std::string& to, const std::string& from) {
    const int n = c_.experts.count, inner = c_.experts.intermediate;
    vector(to + "pre_ffw_norm_2.weight", from + "pre_feedforward_layernorm_2.weight", c_.hidden);
    vector(to + "post_ffw_norm_1.weight", from + "post_feedforward_layernorm_1.weight", c_.hidden);
    vector(to + "post_ffw_norm_2.weight", from + "post_feedforward_layernorm_2.weight", c_.hidden);
    matrix(to + "ffn_gate_inp", from + "router.proj", n, c_.hidden);
    vector(to + "ffn_gate_inp.scale", from + "router.scale", c_.hidden);
    vector(to + "ffn_down_exps.scale", from + "router.per_expert_scale", n);
    tensor(to + "ffn_gate_up_exps.weight", *from_.stacked(from + "experts.gate_up_proj", n, 2 * inner, c_.hidden),
           {u64(n), u64(2 * inner), u64(c_.hidden)});
    tensor(to + "ffn_down_exps.weight", *from_.stacked(from + "experts.down_proj", n, c_.hidden, inner),
           {u64(n), u64(c_.hidden), u64(inner)});
  }

  models::test::GgufWriter& out_;
  const MemoryCheckpoint& from_;
  const models::Config& c_;
};

}  // namespace galley::testing
