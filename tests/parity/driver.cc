// Runs the parity suite's scripts on galley's stock rung and writes every token with its raw log-probabilities.
//
//   galley-parity-driver MODEL_FOLDER SCRIPT.json RESULT.bin
//
// SCRIPT is a list of cases (see cases.py). RESULT is a sequence of records, little-endian:
//   int32 case, int32 request, int32 token, int32 bytes, bytes x log-probabilities in the model's own type
#include <mlx/mlx.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <exception>
#include <fstream>
#include <iostream>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "models/checkpoint.h"
#include "models/stock_forward.h"
#include "ops/error.h"
#include "sample/sampler.h"

namespace {

namespace mx = mlx::core;
using galley::models::Emission;
using galley::models::PromptPart;
using galley::models::RowId;
using galley::models::StepPlan;
using galley::models::StockForward;
using nlohmann::json;

struct Request {
  std::vector<std::int32_t> prompt;
  int max_tokens = 0;
  int arrive = 0;
  std::optional<int> cancel;
};

struct Case {
  std::string mode;
  int prefill_step = 0;
  int prefill_batch = 0;
  int completion_batch = 0;
  std::vector<Request> requests;
};

Case read_case(const json& j) {
  Case c;
  c.mode = j.at("mode");
  c.prefill_step = j.at("prefill_step");
  c.prefill_batch = j.value("prefill_batch", 0);
  c.completion_batch = j.value("completion_batch", 0);
  for (const json& r : j.at("requests")) {
    Request request{r.at("prompt"), r.at("max_tokens"), r.at("arrive"), std::nullopt};
    if (!r.at("cancel").is_null()) request.cancel = r.at("cancel").get<int>();
    c.requests.push_back(std::move(request));
  }
  return c;
}

// A request on its way through a forward.
struct Row {
  int request = 0;
  RowId id = 0;
  const Request* spec = nullptr;
  std::unique_ptr<galley::sample::RowSampler> sampler;
  std::size_t fed = 0;  // prompt tokens
  int emitted = 0;

  [[nodiscard]] std::size_t remaining() const { return spec->prompt.size() - fed; }
  PromptPart part(std::size_t tokens, bool emits) {
    const PromptPart piece{id, std::span(spec->prompt).subspan(fed, tokens), emits};
    fed += tokens;
    return piece;
  }
};

class Runner {
 public:
  Runner(StockForward& forward, const Case& script, int index, std::ofstream& out)
      : forward_(forward), script_(script), index_(index), out_(out) {
    forward_.set_probe([this](RowId id, const mx::array& logprobs) { pending_.emplace(id, logprobs); });
  }

  // generate_step: one request after another, each step launched before the one before it is read.
  void run_serial() {
    for (std::size_t i = 0; i < script_.requests.size(); ++i) {
      Row row = join(static_cast<int>(i));
      while (row.remaining() > 1) {
        const std::size_t piece = std::min(static_cast<std::size_t>(script_.prefill_step), row.remaining() - 1);
        launch({{}, {row.part(piece, false)}});
        collect_until(0, nullptr);
      }
      launch({{}, {row.part(1, true)}});
      while (row.emitted < row.spec->max_tokens) {
        launch({{row.id}, {}});
        collect_until(1, [&](const Emission& emission) { record(row, emission); });
      }
      forward_.leave(row.id);
      collect_until(0, nullptr);
    }
  }

  // BatchGenerator._next, tick by tick.
  void run_batch() {
    std::vector<int> arrivals;
    for (int i = 0; i < static_cast<int>(script_.requests.size()); ++i) arrivals.push_back(i);
    for (int tick = 0; !arrivals.empty() || !queue_.empty() || !prompts_.empty() || !generating_.empty(); ++tick) {
      std::erase_if(arrivals, [&](int i) {
        if (script_.requests[static_cast<std::size_t>(i)].arrive > tick) return false;
        queue_.push_back(i);
        return true;
      });
      cancel(tick);
      step();
    }
    collect_until(0, nullptr);
  }

 private:
  Row join(int request) {
    Row row;
    row.request = request;
    row.spec = &script_.requests[static_cast<std::size_t>(request)];
    row.sampler = std::make_unique<galley::sample::RowSampler>(galley::sample::Params{});
    row.id = forward_.join({static_cast<int>(row.spec->prompt.size()), row.spec->max_tokens, row.sampler.get()});
    return row;
  }

  void launch(const StepPlan& plan) { forward_.launch(plan); }

  template <typename Sink>
  void collect_until(int in_flight, Sink&& sink) {
    while (forward_.in_flight() > in_flight) {
      for (const Emission& emission : forward_.collect()) {
        if constexpr (!std::is_null_pointer_v<std::decay_t<Sink>>) sink(emission);
      }
      pending_.clear();
    }
  }

  void record(Row& row, const Emission& emission) {
    if (emission.fault) throw galley::Error(500, *emission.fault);
    const mx::array& logprobs = pending_.at(row.id);
    for (const std::int32_t number :
         {index_, row.request, emission.choice.token, static_cast<std::int32_t>(logprobs.nbytes())}) {
      out_.write(reinterpret_cast<const char*>(&number), sizeof number);
    }
    out_.write(logprobs.data<char>(), static_cast<std::streamsize>(logprobs.nbytes()));
    ++row.emitted;
  }

  void cancel(int tick) {
    const auto due = [&](const Request& request) { return request.cancel && *request.cancel <= tick; };
    std::erase_if(queue_, [&](int i) { return due(script_.requests[static_cast<std::size_t>(i)]); });
    for (auto* rows : {&prompts_, &generating_}) {
      std::erase_if(*rows, [&](const Row& row) {
        if (!due(*row.spec)) return false;
        forward_.leave(row.id);
        return true;
      });
    }
  }

  void step() {
    StepPlan decode;
    for (const Row& row : generating_) decode.decode.push_back(row.id);
    if (!decode.decode.empty()) {
      launch(decode);
      collect_until(1, [&](const Emission& emission) {
        const auto row = std::ranges::find(generating_, emission.row, &Row::id);
        record(*row, emission);
        if (row->emitted < row->spec->max_tokens) return;
        forward_.leave(row->id);
        generating_.erase(row);
      });
    }
    const auto completion = static_cast<std::size_t>(std::max(script_.completion_batch, script_.prefill_batch));
    if (generating_.size() >= completion) return;
    std::size_t admitted = std::min({static_cast<std::size_t>(script_.prefill_batch) - prompts_.size(),
                                     completion - generating_.size(), queue_.size()});
    for (; admitted > 0; --admitted) {
      prompts_.push_back(join(queue_.front()));
      queue_.pop_front();
    }
    StepPlan prompt;
    std::vector<Row> keep;
    for (Row& row : prompts_) {
      const bool last = row.remaining() == 1;
      const std::size_t piece =
          last ? 1 : std::min(static_cast<std::size_t>(script_.prefill_step), row.remaining() - 1);
      prompt.prompt.push_back(row.part(piece, last));
      (last ? generating_ : keep).push_back(std::move(row));
    }
    prompts_ = std::move(keep);
    if (!prompt.prompt.empty()) launch(prompt);
  }

  StockForward& forward_;
  const Case& script_;
  std::int32_t index_;
  std::ofstream& out_;
  std::deque<int> queue_;
  std::vector<Row> prompts_;
  std::vector<Row> generating_;
  std::unordered_map<RowId, mx::array> pending_;
};

void run(const std::string& folder, const std::string& script, const std::string& result) {
  std::ifstream in(script);
  std::ofstream out(result, std::ios::binary);
  const auto checkpoint = galley::models::open_checkpoint(folder);
  const auto model = galley::models::load_stock_model(*checkpoint);
  const galley::models::StockOptions options{std::numeric_limits<std::size_t>::max() / 2, 64};
  std::int32_t index = 0;
  for (const json& j : json::parse(in)) {
    const Case script_case = read_case(j);
    const bool serial = script_case.mode == "serial";
    const auto forward = serial ? galley::models::make_serial_stock_forward(model, options)
                                : galley::models::make_batched_stock_forward(model, options);
    Runner runner(*forward, script_case, index++, out);
    serial ? runner.run_serial() : runner.run_batch();
  }
  if (!out.flush()) throw galley::Error(500, "cannot write " + result);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: galley-parity-driver MODEL_FOLDER SCRIPT.json RESULT.bin\n";
    return EXIT_FAILURE;
  }
  try {
    run(argv[1], argv[2], argv[3]);
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::cerr << "galley-parity-driver: " << error.what() << '\n';
    return EXIT_FAILURE;
  }
}
