#include <algorithm>
#include <utility>

#include "text/tokenizer.h"

namespace galley::text {

StopMatcher::StopMatcher(std::vector<std::string> stops) : stops_(std::move(stops)) {
  // An empty stop string would match before the first character.
  std::erase_if(stops_, [](const std::string& stop) { return stop.empty(); });
}

StopMatcher::Result StopMatcher::push(std::string_view piece) {
  held_.append(piece);
  for (std::size_t at = 0; at < held_.size(); ++at) {
    const std::string_view rest = std::string_view(held_).substr(at);
    // Which of several stop strings matches at one place doesn't change the text in front of it.
    const auto matches = [rest](const std::string& stop) { return rest.starts_with(stop); };
    const auto may_match = [rest](const std::string& stop) { return std::string_view(stop).starts_with(rest); };
    if (std::any_of(stops_.begin(), stops_.end(), matches)) {
      Result result{held_.substr(0, at), true};
      held_.clear();
      return result;
    }
    // An undecided place is waited for even if a later one matches already: the result must not depend on how the
    // text was cut into pieces.
    if (std::any_of(stops_.begin(), stops_.end(), may_match)) {
      Result result{held_.substr(0, at), false};
      held_.erase(0, at);
      return result;
    }
  }
  return {std::exchange(held_, {}), false};
}

StopMatcher::Result StopMatcher::finish() {
  const std::string text = std::exchange(held_, {});
  std::size_t end = text.size();
  for (const std::string& stop : stops_) end = std::min(end, text.find(stop));
  return {text.substr(0, end), end < text.size()};
}

std::string StopMatcher::flush() { return finish().text; }

}  // namespace galley::text
