// A plain StopMatcher for builds without the text room (which needs Rust); never linked beside the real one.
#include <algorithm>
#include <utility>

#include "text/tokenizer.h"

namespace galley::text {

StopMatcher::StopMatcher(std::vector<std::string> stops) : stops_(std::move(stops)) {
  std::erase(stops_, std::string{});
}

StopMatcher::Result StopMatcher::push(std::string_view piece) {
  held_ += piece;
  std::size_t first = std::string::npos;
  for (const std::string& stop : stops_) first = std::min(first, held_.find(stop));
  if (first != std::string::npos) {
    Result result{held_.substr(0, first), true};
    held_.clear();
    return result;
  }
  for (std::size_t at = 0; at < held_.size(); ++at) {
    const std::string_view tail = std::string_view(held_).substr(at);
    if (std::ranges::any_of(stops_, [&](const std::string& stop) { return stop.starts_with(tail); })) {
      Result result{held_.substr(0, at), false};
      held_.erase(0, at);
      return result;
    }
  }
  return {std::exchange(held_, {}), false};
}

std::string StopMatcher::flush() { return std::exchange(held_, {}); }

}  // namespace galley::text
