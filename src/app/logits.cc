#include <fmt/format.h>

#include <fstream>

#include "app/model_files.h"
#include "app/options.h"
#include "ops/error.h"

namespace galley::app {

int logits(LogitsOptions options) {
  options.model.resolve();
  std::ifstream file(options.tokens);
  if (!file) throw Error(400, fmt::format("{}: can't be read", options.tokens));
  const auto checkpoint = models::open_checkpoint(options.model.model);
  std::vector<std::int32_t> tokens;
  for (std::int32_t id = 0; file >> id;) {
    if (id < 0 || id >= checkpoint->config().vocab) {
      throw Error(400, fmt::format("{}: {} is not a token id of this model (0 to {})", options.tokens, id,
                                   checkpoint->config().vocab - 1));
    }
    tokens.push_back(id);
  }
  if (tokens.empty() || !file.eof()) {
    throw Error(400,
                fmt::format("{}: after {} token ids comes something else; it should hold ids in decimal, separated by "
                            "blanks or line ends",
                            options.tokens, tokens.size()));
  }
  const int context = options.model.runtime.context;
  if (context > 0 && tokens.size() > static_cast<std::size_t>(context)) {
    throw Error(400, fmt::format("{}: {} tokens are more than --context {}", options.tokens, tokens.size(), context));
  }
  const std::vector<float> all = models::prompt_logits(*checkpoint, options.model.runtime, tokens);
  std::ofstream out(options.out, std::ios::binary);
  out.write(reinterpret_cast<const char*>(all.data()), static_cast<std::streamsize>(all.size() * sizeof(float)));
  out.flush();
  if (!out) throw Error(500, fmt::format("{}: can't be written", options.out));
  fmt::print("{} positions of {} logits\n", tokens.size(), all.size() / tokens.size());
  return 0;
}

}  // namespace galley::app
