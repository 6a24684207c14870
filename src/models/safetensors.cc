#include "models/safetensors.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>

#include "models/checkpoint_numbers.h"
#include "models/checkpoint_shapes.h"
#include "ops/error.h"

namespace galley::models {
namespace {

using nlohmann::json;

// The format's own limit; a longer header is a damaged length.
constexpr std::uint64_t max_header = 100'000'000;

/// Bits of an element; 0 for a type that is not known.
std::uint64_t element_bits(const std::string& dtype) {
  struct Width {
    std::string_view dtype;
    std::uint64_t bits;
  };
  static constexpr std::array widths{
      Width{"BOOL", 8},    Width{"U8", 8},      Width{"I8", 8},   Width{"F8_E4M3", 8},
      Width{"F8_E5M2", 8}, Width{"F8_E8M0", 8}, Width{"U16", 16}, Width{"I16", 16},
      Width{"F16", 16},    Width{"BF16", 16},   Width{"U32", 32}, Width{"I32", 32},
      Width{"F32", 32},    Width{"U64", 64},    Width{"I64", 64}, Width{"F64", 64},
  };
  const auto found = std::ranges::find(widths, dtype, &Width::dtype);
  return found == widths.end() ? 0 : found->bits;
}

class HeaderReader {
 public:
  HeaderReader(const std::filesystem::path& path, std::span<const std::byte> bytes) : path_(path), bytes_(bytes) {}

  std::map<std::string, SafeTensor> read() {
    if (bytes_.size() < 8) fail("expected at least 8 bytes, found " + std::to_string(bytes_.size()));
    const auto length = load_unaligned<std::uint64_t>(bytes_.data());
    if (length > max_header || length > bytes_.size() - 8) {
      fail("the header announces " + std::to_string(length) + " bytes, but the file has " +
           std::to_string(bytes_.size()) + ": it is truncated, damaged or no safetensors file");
    }
    data_ = bytes_.subspan(8 + static_cast<std::size_t>(length));
    std::map<std::string, SafeTensor> tensors;
    const json header = parse(bytes_.subspan(8, static_cast<std::size_t>(length)));
    for (const auto& [name, entry] : header.items()) {
      if (name != "__metadata__") tensors.emplace(name, tensor(name, entry));
    }
    return tensors;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const { throw ModelError(path_.string() + ": " + what); }

  json parse(std::span<const std::byte> text) const {
    std::set<std::string> names;
    const auto unique = [&](int depth, json::parse_event_t event, json& parsed) {
      if (depth == 1 && event == json::parse_event_t::key && !names.insert(parsed.get<std::string>()).second) {
        fail("tensor \"" + parsed.get<std::string>() + "\" occurs twice");
      }
      return true;
    };
    const auto* const from = reinterpret_cast<const char*>(text.data());
    json header;
    try {
      header = json::parse(from, from + text.size(), unique);
    } catch (const json::exception& error) {
      fail(std::string("the header is not valid JSON: ") + error.what());
    }
    if (!header.is_object()) fail("the header is not a JSON object");
    return header;
  }

  SafeTensor tensor(const std::string& name, const json& entry) const {
    const std::string what = "tensor \"" + name + "\"";
    const auto sizes = [&](const char* key) {
      const auto list = entry.find(key);
      if (list == entry.end() || !list->is_array()) fail(what + ": \"" + key + "\" is missing or not a list");
      std::vector<std::uint64_t> out;
      for (const json& element : *list) {
        if (!element.is_number_unsigned()) fail(what + ": \"" + key + "\" must hold non-negative integers");
        out.push_back(element.get<std::uint64_t>());
      }
      return out;
    };
    if (!entry.is_object()) fail(what + ": its entry is not a JSON object");
    const auto dtype = entry.find("dtype");
    if (dtype == entry.end() || !dtype->is_string()) fail(what + ": \"dtype\" is missing or not a string");

    SafeTensor out;
    out.dtype = dtype->get<std::string>();
    out.shape = sizes("shape");
    const auto offsets = sizes("data_offsets");
    const std::uint64_t bits = element_bits(out.dtype);
    if (bits == 0) fail(what + ": data type \"" + out.dtype + "\" is not known");
    std::uint64_t expected = bits / 8;
    for (const std::uint64_t size : out.shape) {
      if (__builtin_mul_overflow(expected, size, &expected)) {
        fail(what + ": no tensor can have shape " + shape_text(out.shape));
      }
    }
    if (offsets.size() != 2 || offsets[0] > offsets[1]) fail(what + ": \"data_offsets\" must be [begin, end]");
    if (offsets[1] > data_.size()) {
      fail(what + ": expected its data up to byte " + std::to_string(offsets[1]) + " after the header, but only " +
           std::to_string(data_.size()) + " are there: the file is truncated or damaged");
    }
    if (offsets[1] - offsets[0] != expected) {
      fail(what + ": shape " + shape_text(out.shape) + " of " + out.dtype + " needs " + std::to_string(expected) +
           " bytes, found " + std::to_string(offsets[1] - offsets[0]));
    }
    out.data = data_.data() + offsets[0];
    return out;
  }

  const std::filesystem::path& path_;
  std::span<const std::byte> bytes_;
  std::span<const std::byte> data_;
};

}  // namespace

SafeTensorsFile::SafeTensorsFile(const std::filesystem::path& path)
    : file_(path), tensors_(HeaderReader(file_.path(), file_.bytes()).read()) {}

}  // namespace galley::models
