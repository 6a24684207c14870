// galley's CPU kernels: matrix products with fused epilogues, attention over paged KV, and row helpers. Plain C++ types
// only; free of MLX. Bodies are compiled per instruction set and chosen by the Isa a Context holds.
//
// Invariance: a row's bits depend on the row's own numbers and positions and on the instruction set, never on the other
// rows, the tiling, the number of threads or how a prompt was chunked. No reduction's order depends on anything else.
//
// Numbers: affine weights multiply int8 activations (one scale per row and group) exactly in integers, groups are added
// up in fp32 in order of k; the weights' bias multiplies the sum of the *quantized* activations. Plain weights
// multiply fp32 activations, one fused multiply-add after the other in order of k.
//
// RMS norms are split: the producer multiplies by the norm's weight, quantizes, and leaves sums of squares; the
// consumer multiplies its result by the row's factor 1/sqrt(mean(x^2) + eps). So no pass over the rows stands between.
//
// Unless said otherwise: row-major arrays, float pointers need no alignment, sizes are counted in elements, and a call
// returns when its result is complete. A Context is used by one thread at a time.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "ops/kernels/activations.h"
#include "ops/kernels/isa.h"
#include "ops/kernels/pack.h"
#include "ops/kernels/paged_kv.h"
#include "ops/kernels/pool.h"

namespace galley::kernels {

/// What a kernel call runs on: an instruction set, a thread pool, and scratch memory for each thread.
class Context {
 public:
  Context(Isa isa, int threads, int spin_us = 40);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  [[nodiscard]] const Isa& isa() const { return isa_; }
  [[nodiscard]] Pool& pool() { return pool_; }
  [[nodiscard]] int threads() const { return pool_.threads(); }
  /// Upper bound of the rows in a tile; tests lower it. 1 .. isa().max_tile.
  [[nodiscard]] int max_tile() const { return max_tile_; }
  void set_max_tile(int rows);

  /// Shapes `a` as the input of `consumer`: its form and depth. `normed`: an RMS norm stands before the consumer.
  void reshape(Activations& a, int rows, const PackedMatrix& consumer, bool normed) const {
    a.reshape(rows, consumer.depth(), consumer.input_form(), normed, max_tile_);
  }

  struct Scratch;  // internal
  [[nodiscard]] Scratch& scratch() { return *scratch_; }

 private:
  Isa isa_;
  Pool pool_;
  int max_tile_;
  std::unique_ptr<Scratch> scratch_;
};

/// KV that an attention will read soon. With several rows a product computes longer than its weights take to come from
/// memory; in the time left over it can ask for KV, which the attention would wait for. Changes no result.
struct KvAhead {
  RowPlaces places;
  PagedKv kv;
  int window = 0;  ///< as in Attention
};

/// A matrix and what it multiplies. `x` must have the form and depth of `w`; when x->normed() the product is multiplied
/// by each row's RMS factor with `eps`. After that the matrix's own bias is added. Mismatches throw
/// std::invalid_argument.
struct Product {
  const PackedMatrix* w = nullptr;
  const Activations* x = nullptr;
  float eps = 1e-5F;               ///< of the norm before this product
  const KvAhead* ahead = nullptr;  ///< linear_gated: KV to fetch meanwhile; null: none
};

// ---- products, named by what happens to the result -----------------------------------------------------------------

/// y[r * ld + c] = product, for the matrix's real columns. (Logits of a step, or any plain linear layer.) A `softcap`
/// above 0 bends it: softcap * tanh(product / softcap).
void linear(Context& context, const Product& product, float* y, std::size_t ld, float softcap = 0.0F);

struct Residual {
  const float* residual = nullptr;  ///< [rows][ld]; may be `y`
  float* y = nullptr;               ///< [rows][ld] residual + scale * product
  std::size_t ld = 0;               ///< >= the matrix's columns
  float scale = 1.0F;               ///< of the product (some families damp their residual branches)
  const float* norm = nullptr;      ///< [columns] weight of the norm that follows; null: none (plain y is passed on)
  Activations* out = nullptr;       ///< input of the next product, shaped for it (normed iff `norm`); null: y alone
  float whole = 1.0F;               ///< norm_residual: of the sum
};
/// The end of a residual branch: adds, stores, and leaves what the next product reads.
void linear_residual(Context& context, const Product& product, const Residual& to);

enum class Gate { silu, gelu_tanh };
/// activation(gate) * up for a matrix made by PackedMatrix::interleave, into `out` (shaped for the down projection).
void linear_gated(Context& context, const Product& product, Gate gate, Activations& out);

/// token[r] = index of the row's largest product, the first of equals; value[r] (if not null) that product. A row
/// without any comparable value (all NaN) gets token -1. `softcap` as in linear(), whose equals are these.
void linear_argmax(Context& context, const Product& product, std::int32_t* token, float* value = nullptr,
                   float softcap = 0.0F);

/// Rotary embedding of the first `dims` of a head.
struct RopeTable {
  const float* table = nullptr;  ///< [positions][dims]: dims/2 cosines, then dims/2 sines; null: no rotation
  int dims = 0;                  ///< even, <= head_dim
  bool traditional = false;      ///< pairs (2i, 2i+1) instead of (i, i + dims/2)
};

struct QkvOutput {
  RowPlaces places;
  PagedKv kv;            ///< receives K and V at places.position
  int heads = 0;         ///< query heads; kv.kv_heads of K and of V follow
  float* q = nullptr;    ///< [rows][heads * head_dim] f32, rotated and scaled by q_scale
  float q_scale = 1.0F;  ///< of the scores; attention() wants scale * log2(e), see query_scale()
  RopeTable rope;
  const float* q_norm = nullptr;  ///< [head_dim] weight of a norm over each query head before RoPE, or null
  const float* k_norm = nullptr;  ///< the same for key heads
  const float* v_norm = nullptr;  ///< the same for values
  float head_norm_eps = 1e-5F;
  bool values_are_keys = false;  ///< the matrix holds no values: they are the keys before norm and RoPE
  /// Head of the matrix's first column among [heads | kv_heads of K | kv_heads of V]. Not 0 when q, k and v could not
  /// be packed into one matrix: then one call a matrix, each writing the heads it holds.
  int first_head = 0;
};
/// Product, per-head norm, RoPE; q is stored, K and V are rounded to the cache's element type and written in place.
void linear_qkv(Context& context, const Product& product, const QkvOutput& to);

/// The q_scale for scores scaled by `attention_scale`: attention() computes powers of two.
[[nodiscard]] constexpr float query_scale(float attention_scale) { return attention_scale * 1.4426950408889634F; }

// ---- attention -----------------------------------------------------------------------------------------------------

struct Attention {
  RowPlaces places;
  PagedKv kv;                ///< K and V of all positions up to each row's own are written
  int heads = 0;             ///< a multiple of kv.kv_heads; query head h reads KV head h / (heads / kv_heads)
  const float* q = nullptr;  ///< as linear_qkv leaves it
  int window = 0;            ///< a row sees its own token and the window - 1 before it; 0: all
  float softcap = 0.0F;      ///< scores become cap * tanh(score / cap); 0: none
};
/// Causal attention by absolute position, [rows][heads * head_dim], into `out` (shaped for the output projection). Keys
/// and values are read only as stored. The key range is cut at multiples of kAttentionSegment absolute positions and
/// the parts combined in order, always, so that one long row can use all threads without a change of bits.
void attention(Context& context, const Attention& args, Activations& out);
constexpr int kAttentionSegment = 512;

// ---- experts -------------------------------------------------------------------------------------------------------

/// A mixture of experts: gated MLPs of which every row picks a few.
struct MoeLayer {
  std::span<const PackedMatrix> gate_up;  ///< [experts], made by PackedMatrix::interleave
  std::span<const PackedMatrix> down;     ///< [experts]
  Gate gate = Gate::silu;
  int picks = 0;                ///< experts a row is sent to: those with its largest scores, of equals the lower index
  bool normalized = false;      ///< the weights of the picked ones are divided by their sum
  const float* norm = nullptr;  ///< [hidden] weight of the norm before the experts
  float eps = 1e-5F;
  const float* factors = nullptr;  ///< [experts] of the weights, after they were normalized; null: none
  bool residual = true;            ///< false: y[r] is the sum alone, without x[r]
};
/// y[r] = x[r] + sum over the picked experts of weight * expert(norm(x[r])), added up in order of the row's scores,
/// largest first. Weights: softmax of `scores` [rows][experts]. x and y: [rows][hidden], not the same memory.
void experts(Context& context, const MoeLayer& moe, const float* scores, const float* x, int rows, float* y);

// ---- rows ----------------------------------------------------------------------------------------------------------

/// y[r] = scale * (column token[r] of `table`, decoded), and if `out` is given the same rows times `norm` (may be null)
/// in the form of layer 0's input. `table` is an embedding matrix packed by concatenate(); tokens must lie in [0,
/// columns).
void embed(Context& context, const PackedMatrix& table, std::span<const std::int32_t> tokens, float scale, float* y,
           std::size_t ld, const float* norm, Activations* out);

/// Vectors for every layer, made of a projection of a row's embedding and an embedding of their own.
struct PerLayerSum {
  int layers = 0;
  int width = 0;                ///< of one layer's vector
  const float* norm = nullptr;  ///< [width] weight of the norm of each layer's part of the projection
  float eps = 1e-6F;
  float projection_scale = 1.0F;  ///< before that norm
  float scale = 1.0F;             ///< of the sum
};
/// y = scale * (norm(projected * projection_scale) + y), layer by layer; both [rows][layers * width].
void per_layer_sum(Context& context, const PerLayerSum& sum, const float* projected, int rows, float* y);

/// out row r = activation(x[r]) * by[r], in the form `out` was shaped for.
void gate_rows(Context& context, const float* x, std::size_t ldx, const float* by, std::size_t ldby, Gate gate,
               Activations& out);

/// out row r = norm(x[row r]) in the form `out` was shaped for: the producer used where no epilogue could do it. Gives
/// the very bits the epilogues give. `rows` (may be null): [out.rows()] which row of x to take, so that the head can
/// read just the rows that emit. `norm` null: no norm, values are passed on.
void norm_quantize(Context& context, const float* x, std::size_t ld, const std::int32_t* rows, const float* norm,
                   Activations& out);

/// The end of a residual branch that is normed before it is added: y[r] = to.whole * (residual[r] + to.scale * x[r] *
/// weight / sqrt(mean(x[r]^2) + eps)), then as linear_residual. x is [rows][to.ld] and may be y, `weight` [columns]. A
/// null residual counts as zeros.
void norm_residual(Context& context, const float* x, int rows, int columns, const float* weight, float eps,
                   const Residual& to);

}  // namespace galley::kernels
