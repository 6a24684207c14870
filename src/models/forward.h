// The forward pass as the serving side sees it: rows join, take part in steps, and leave.
//
// Free of MLX, so that the scheduler can be tested against a scripted forward. All calls come from the engine thread.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "sample/sampler.h"

namespace galley::models {

/// Names a row inside one Forward, from join() to leave(); never reused while anything of the row is in flight.
using RowId = std::int32_t;

/// What a row will need. Sampler and prompt are borrowed: they outlive the row's last step in flight.
struct RowSpec {
  int prompt_tokens = 0;
  int max_tokens = 0;  ///< tokens that may be generated
  sample::RowSampler* sampler = nullptr;
  std::span<const std::int32_t> prompt = {};  ///< what others' KV may be shared for; empty: the row shares none
};

/// What a row need not compute of its prompt.
struct Reuse {
  std::size_t tokens = 0;  ///< next ones of the prompt that are there already: not to be fed
  bool wait = false;       ///< another row is computing what comes next: better fed in a later step
};

/// A piece of a prompt. Tokens are borrowed until the launch() that takes them returns.
struct PromptPart {
  RowId row = 0;
  std::span<const std::int32_t> tokens;
  bool emits = false;  ///< the prompt's last piece: the row samples its first token in this step
};

/// One step: every decoding row advances by a token, some prompts by a piece. `decode` rows feed the token that their
/// previous step sampled; it need not have been collected yet. A row is in at most one of the lists.
struct StepPlan {
  std::vector<RowId> decode;
  std::vector<PromptPart> prompt;
};

/// What a step yields for one row: those in `decode`, then the prompt parts that emit, in plan order. A row that failed
/// has one even if it was not to emit.
struct Emission {
  RowId row = 0;
  sample::Choice choice;
  std::optional<std::string> fault;  ///< the row (and no other) failed in this step; `choice` is void
};

/// KV memory in bytes and blocks (contiguous caches report one block a row slot). GB = 10^9 bytes.
struct KvUsage {
  std::size_t budget_bytes = 0;
  std::size_t used_bytes = 0;      ///< held by rows now
  std::size_t unused_bytes = 0;    ///< of used_bytes, those that no token has been written to yet (paged)
  std::size_t cached_bytes = 0;    ///< held by none, remembered for prompts to come
  std::size_t reserved_bytes = 0;  ///< promised to rows, used or not
  // Of used_bytes and cached_bytes, those of sliding layers that don't keep the whole text (paged).
  std::size_t window_used_bytes = 0;
  std::size_t window_cached_bytes = 0;
  // Of models with sliding layers: in whole blocks' worth of memory, for all layers.
  int blocks_total = 0;
  int blocks_free = 0;    ///< held by no row
  int blocks_cached = 0;  ///< of the free ones, those remembered
  int block_tokens = 0;
};

/// How a Forward wants to be driven (DESIGN section 4.1).
struct ForwardTraits {
  /// True (stock): decode rows, last prompt tokens and prompt pieces run as separate forwards, and a prompt's last
  /// token always makes a part of its own, as in mlx-lm. False (fused): one ragged forward takes them all.
  bool split_forwards = false;
  /// Launch step n+1 before step n is collected. A row found finished in n still rides n+1 and is dropped there.
  bool look_ahead = false;
  /// A row's results don't depend on who shares the batch (all ops fused).
  bool invariant = false;
  int vocab = 0;
};

class Forward {
 public:
  virtual ~Forward() = default;

  [[nodiscard]] virtual const ForwardTraits& traits() const = 0;
  [[nodiscard]] virtual KvUsage kv() const = 0;
  /// Bytes that a row of this many tokens (prompt + generated) reserves at most when it is alone.
  /// A pure function of the configuration, and so the one call that any thread may make once loading is done.
  [[nodiscard]] virtual std::size_t bytes_for(int tokens) const = 0;
  /// Most tokens (prompt + generated) that one row can ever hold under the budget.
  [[nodiscard]] virtual int max_row_tokens() const = 0;
  /// Whether such a row can join now without exceeding the budget. What is not reserved at the join (see fits) the
  /// caller frees by sending away the youngest rows, to join again later.
  [[nodiscard]] virtual bool can_join(const RowSpec& spec) const = 0;

  /// Takes in a row and reserves KV for its prompt at least. Throws galley::Error (503) when !can_join(spec).
  virtual RowId join(const RowSpec& spec) = 0;
  /// To be asked before each piece of a prompt: shares the KV of other rows, past and present, that begin alike. Never
  /// covers a prompt's last token.
  virtual Reuse reuse(RowId /*row*/) { return {}; }
  /// Ends a row at once; memory that a step in flight still touches is freed when that step has been collected.
  virtual void leave(RowId row) = 0;

  /// Whether the KV that this step writes can be had now. If not, rows must leave first; a row alone always fits.
  [[nodiscard]] virtual bool fits(const StepPlan& /*plan*/) const { return true; }
  /// Starts a step that fits; may return before it is computed.
  virtual void launch(const StepPlan& plan) = 0;
  /// Steps launched and not yet collected.
  [[nodiscard]] virtual int in_flight() const = 0;
  /// Waits for the oldest step in flight. A fault of one row is in its Emission; what is thrown here or by launch() can
  /// not be laid at one row's door. Rows that left since the launch are omitted.
  virtual std::vector<Emission> collect() = 0;
  /// A small piece of work that can wait, such as saving what a later process may use; called when no request is left.
  /// False: there is none.
  virtual bool tidy() { return false; }
  /// After launch() or collect() threw: forgets all rows and steps, none of which is to be named again, and is as good
  /// as new. False: that can't be done, and the engine is lost.
  virtual bool recover() { return false; }
};

}  // namespace galley::models
