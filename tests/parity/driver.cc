// Runs the parity suite's scripts through the server's own Scheduler and SerialLane on the stock rung, and writes every
// token with its raw log-probabilities.
//
//   galley-parity-driver MODEL_FOLDER SCRIPT.json RESULT.bin KV_QUANT
//
// SCRIPT is a list of cases (see cases.py). KV_QUANT: as --kv-quant. RESULT is a sequence of records, little-endian:
//   int32 case, int32 request, int32 token, int32 bytes, bytes x log-probabilities in the model's own type
//   int32 case, int32 -1, int32 rows, int32 8, int32 tokens a row, int32 cache columns      for every forward
//   int32 case, int32 -2, int32 request, int32 4, int32 cached tokens of its prompt          where KV is reused
#include <mlx/mlx.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
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
#include "models/kv_quant.h"
#include "models/stock_forward.h"
#include "ops/error.h"
#include "serve/row.h"
#include "serve/scheduler.h"
#include "serve/serial_lane.h"

namespace {

namespace mx = mlx::core;
using galley::models::RowId;
using galley::models::StockForward;
using galley::serve::Row;
using nlohmann::json;

struct Request {
  std::optional<std::size_t> follows;  ///< the prompt goes on from this request's prompt and answer
  std::vector<std::int32_t> prompt;
  int max_tokens = 0;
  int arrive = 0;             ///< the tick before which it comes
  std::optional<int> cancel;  ///< the tick before which it goes
};

struct Case {
  bool serial = false;
  bool reuse = false;  ///< with a prompt cache
  int prefill_step = 0;
  int prefill_batch = 0;
  int completion_batch = 0;
  std::vector<std::int32_t> end_ids;
  std::vector<Request> requests;
};

Case read_case(const json& j) {
  Case c;
  c.serial = j.at("mode") == "serial";
  c.reuse = j.value("reuse", false);
  c.prefill_step = j.at("prefill_step");
  c.prefill_batch = j.value("prefill_batch", 0);
  c.completion_batch = j.value("completion_batch", 0);
  c.end_ids = j.value("end_ids", std::vector<std::int32_t>{});
  for (const json& r : j.at("requests")) {
    Request request{std::nullopt, r.at("prompt"), r.at("max_tokens"), r.at("arrive"), std::nullopt};
    if (r.contains("follows")) request.follows = r.at("follows").get<std::size_t>();
    if (!r.at("cancel").is_null()) request.cancel = r.at("cancel").get<int>();
    c.requests.push_back(std::move(request));
  }
  return c;
}

// A row's last event may carry an error: the suite stops there.
struct FailOnError final : galley::serve::EventSink {
  void push(galley::serve::TokenEvent event) noexcept override {
    if (!event.error) return;
    std::cerr << "galley-parity-driver: " << event.error->what() << '\n';
    std::exit(EXIT_FAILURE);
  }
};

class Runner {
 public:
  Runner(StockForward& forward, const Case& script, std::int32_t index, std::ofstream& out)
      : forward_(forward), script_(script), index_(index), out_(out), sink_(std::make_shared<FailOnError>()) {
    context_.end_ids = script_.end_ids;
    tickets_.resize(script_.requests.size());
    texts_.resize(script_.requests.size());
    forward_.set_shape_probe([this](int rows, int length, int columns) { record_shape(rows, length, columns); });
    forward_.set_probe([this](RowId id, const mx::array& logprobs) { probed_.insert_or_assign(id, logprobs); });
  }

  void run() { script_.serial ? run_serial() : run_batch(); }

 private:
  std::unique_ptr<Row> make_row(std::size_t index) {
    const Request& request = script_.requests[index];
    galley::serve::GenerationRequest generation;
    std::vector<std::int32_t>& text = texts_[index];
    if (request.follows) text = texts_.at(*request.follows);
    text.insert(text.end(), request.prompt.begin(), request.prompt.end());
    generation.prompt = text;
    generation.max_tokens = request.max_tokens;
    tickets_[index] = std::make_shared<galley::serve::Ticket>();
    auto row = std::make_unique<Row>(context_, std::move(generation), sink_, tickets_[index]);
    row->observe([this, index, self = row.get()](const galley::sample::Choice& choice) {
      texts_[index].push_back(choice.token);
      if (script_.reuse && self->usage().completion_tokens == 1) {
        write({index_, -2, static_cast<std::int32_t>(index), 4, self->usage().cached_tokens});
      }
      record(static_cast<std::int32_t>(index), choice.token, probed_.at(self->id()));
    });
    return row;
  }

  void run_serial() {
    galley::serve::SerialLane lane(forward_, script_.prefill_step);
    for (std::size_t i = 0; i < script_.requests.size(); ++i) {
      lane.start(make_row(i));
      while (lane.busy()) lane.step();
    }
  }

  void run_batch() {
    galley::serve::SchedulerOptions options;
    options.batch = std::max(script_.completion_batch, script_.prefill_batch);
    options.prompt_concurrency = script_.prefill_batch;
    options.prefill_step = script_.prefill_step;
    options.max_rows = options.batch + options.prompt_concurrency;
    galley::serve::Scheduler scheduler(forward_, options);
    std::size_t arrived = 0;
    for (int tick = 0; arrived < script_.requests.size() || !scheduler.idle(); ++tick) {
      for (std::size_t i = 0; i < script_.requests.size(); ++i) {
        const Request& request = script_.requests[i];
        if (request.arrive == tick) {
          scheduler.enqueue(make_row(i));
          ++arrived;
        }
        if (request.cancel == tick) tickets_[i]->cancel();
      }
      scheduler.tick();
    }
  }

  void write(std::initializer_list<std::int32_t> numbers) {
    for (const std::int32_t number : numbers) out_.write(reinterpret_cast<const char*>(&number), sizeof number);
  }

  void record_shape(int rows, int length, int columns) { write({index_, -1, rows, 8, length, columns}); }

  void record(std::int32_t request, std::int32_t token, const mx::array& logprobs) {
    write({index_, request, token, static_cast<std::int32_t>(logprobs.nbytes())});
    out_.write(logprobs.data<char>(), static_cast<std::streamsize>(logprobs.nbytes()));
  }

  StockForward& forward_;
  const Case& script_;
  std::int32_t index_;
  std::ofstream& out_;
  std::shared_ptr<FailOnError> sink_;
  galley::serve::RowContext context_;
  std::vector<std::shared_ptr<galley::serve::Ticket>> tickets_;
  std::vector<std::vector<std::int32_t>> texts_;  ///< prompts and what was said to them
  std::unordered_map<RowId, mx::array> probed_;   ///< each row's latest log-probabilities
};

void run(const std::string& folder, const std::string& script, const std::string& result, const std::string& kv_quant) {
  std::ifstream in(script);
  std::ofstream out(result, std::ios::binary);
  const auto checkpoint = galley::models::open_checkpoint(folder);
  const auto model = galley::models::load_stock_model(
      *checkpoint, /*dense=*/false, galley::models::KvQuant::choose(kv_quant, *checkpoint, /*batch=*/1));
  constexpr std::size_t kPlenty = std::numeric_limits<std::size_t>::max() / 2;
  std::int32_t index = 0;
  for (const json& j : json::parse(in)) {
    const Case script_case = read_case(j);
    galley::models::StockOptions options{kPlenty, 64};
    if (script_case.reuse) options.prompt_cache = std::make_shared<galley::kv::PromptCache>(kPlenty);
    const auto forward = script_case.serial ? galley::models::make_serial_stock_forward(model, options)
                                            : galley::models::make_batched_stock_forward(model, options);
    Runner(*forward, script_case, index++, out).run();
  }
  if (!out.flush()) throw galley::Error(500, "cannot write " + result);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::cerr << "usage: galley-parity-driver MODEL_FOLDER SCRIPT.json RESULT.bin KV_QUANT\n";
    return EXIT_FAILURE;
  }
  try {
    run(argv[1], argv[2], argv[3], argv[4]);
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::cerr << "galley-parity-driver: " << error.what() << '\n';
    return EXIT_FAILURE;
  }
}
