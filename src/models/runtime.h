// From a checkpoint and the user's choices to forwards that are ready to run.
#pragma once
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "models/checkpoint.h"
#include "models/forward.h"

namespace galley::models {

/// The composite ops that can be switched off one by one, by their command-line names.
extern const std::vector<std::string> kFusedOpNames;

struct RuntimeOptions {
  bool fused = true;                      ///< false: stock
  std::vector<std::string> switched_off;  ///< names out of kFusedOpNames; fused only
  std::string isa = "best";               ///< fused only
  int threads = 0;                        ///< 0: every processor this process may use
  int batch = 1;                          ///< rows of the batched lane; 1: serial lane only
  int context = 0;                        ///< tokens a row may hold; 0: what the model was made for
  int prefill_step = 2048;                ///< prompt tokens in one step, at most: how wide stock's rings get
  std::size_t kv_budget_bytes = 0;        ///< 0: what `batch` full contexts need, at most a quarter of free memory
  /// Of the KV budget, what finished requests may keep for prompts that begin alike. Absent: all that is free; 0: none.
  std::optional<std::size_t> prompt_cache_bytes;
  /// Where KV blocks outlive the process (fused); empty: nowhere. `warn` is told what can't be used there.
  std::string prompt_cache_dir;
  std::function<void(const std::string&)> warn;
  std::string kv_layout;         ///< "paged" or "contiguous"; empty: paged with fused, contiguous with stock
  std::string kv_dtype = "f16";  ///< fused: f16, bf16, f32. Stock keeps KV in the model's own type.
  /// KV quantization: off, 8, 4 or config (see KvQuant); empty: with one row what the model's kv_config.json says.
  std::string kv_quant;
  bool dense = false;  ///< stock: expand quantized matrices at load (faster, more memory)
};

/// Forwards over one set of weights, and what the ready card says of them. Made and used on one thread.
struct Runtime {
  std::shared_ptr<Forward> serial;
  std::shared_ptr<Forward> batched;  ///< null when options.batch == 1
  std::string kernels;               ///< "fused" or "stock"
  std::string isa;                   ///< fused: instruction set; stock: "mlx"
  int threads = 1;
  int context = 0;
  int max_row_tokens = 0;        ///< what one row can hold under the KV budget
  std::string kv_plan;           ///< for people: "paged, 32-token blocks of f16 …"
  std::size_t weight_bytes = 0;  ///< packed weights (fused)
};

/// Loads on the calling thread, which must be the one that uses the forwards. Throws ModelError, Error.
Runtime make_runtime(const Checkpoint& checkpoint, const RuntimeOptions& options);

/// Logits [n, vocab] of every position of `tokens`, for measuring quality.
std::vector<float> prompt_logits(const Checkpoint& checkpoint, const RuntimeOptions& options,
                                 const std::vector<std::int32_t>& tokens);

/// Processors this process may run on.
int usable_processors();
/// Bytes of memory that can be had without swapping.
std::size_t available_memory();

}  // namespace galley::models
