// Private to this room: the text crate's interface in galley's terms (views in, galley errors out).
#pragma once
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

#include "rust/cxx.h"
// After cxx.h, whose types it otherwise declares in part.
#include "text/assets.h"
#include "text_bridge.h"

namespace galley::text {

/// A view for the crate; throws std::invalid_argument when it isn't UTF-8.
inline rust::Str to_rust(std::string_view text) { return rust::Str(text.data(), text.size()); }

/// A slice for the crate (a Rust slice of no elements must not be null, which rust::Slice sees to).
template <typename Container>
auto to_slice(const Container& values) {
  using Value = const std::remove_reference_t<decltype(*values.data())>;
  return rust::Slice<Value>(values.data(), values.size());
}

/// Runs a call into the crate; its errors, and text that isn't UTF-8, go to `raise(message)`, which throws.
template <typename Call, typename Raise>
auto call_crate(Call&& call, Raise&& raise) -> decltype(call()) {
  std::string message;
  try {
    return call();
  } catch (const rust::Error& error) {
    message = error.what();
  } catch (const std::invalid_argument&) {
    message = "text is not valid UTF-8";
  }
  raise(message);
  throw std::logic_error("raise must throw");
}

}  // namespace galley::text
