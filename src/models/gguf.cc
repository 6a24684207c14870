#include "models/gguf.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <limits>
#include <span>
#include <utility>

#include "models/checkpoint_numbers.h"
#include "models/checkpoint_shapes.h"
#include "ops/error.h"

namespace galley::models {
namespace {

constexpr std::uint32_t magic = 0x46554747;  // "GGUF"
constexpr std::uint64_t default_alignment = 32;
constexpr std::uint32_t max_dimensions = 4;
constexpr std::uint64_t max_name = 65535;

// The least bytes that an entry can take: bounds on counts, checked before anything is allocated.
constexpr std::uint64_t least_key_value = 8 + 4 + 1;
constexpr std::uint64_t least_tensor = 8 + 4 + 8 + 4 + 8;

// Pieces of a split model: "<stem>-00002-of-00003.gguf", numbered from 1.
constexpr std::size_t piece_digits = 5;
constexpr std::int64_t max_pieces = 99999;
constexpr std::string_view piece_of = "-of-", extension = ".gguf";
constexpr std::size_t piece_tail = 1 + piece_digits + piece_of.size() + piece_digits + extension.size();

std::string piece_name(const std::string& stem, std::int64_t number, std::int64_t count) {
  std::array<char, 64> tail;
  std::snprintf(tail.data(), tail.size(), "-%05lld-of-%05lld.gguf", static_cast<long long>(number),
                static_cast<long long>(count));
  return stem + tail.data();
}

/// What a piece's name says: the model's, the piece's number, how many there are.
struct PieceName {
  std::string stem;
  std::int64_t number, count;
};

std::optional<PieceName> parse_piece(const std::filesystem::path& path) {
  const std::string name = path.filename().string();
  if (name.size() <= piece_tail) return std::nullopt;
  const auto digits = [&](std::size_t at) {
    std::int64_t value = 0;
    for (std::size_t i = at; i < at + piece_digits; ++i) {
      if (name[i] < '0' || name[i] > '9') return std::int64_t{-1};
      value = 10 * value + (name[i] - '0');
    }
    return value;
  };
  const std::size_t at = name.size() - piece_tail;
  const PieceName piece{name.substr(0, at), digits(at + 1), digits(at + 1 + piece_digits + piece_of.size())};
  const bool sound =
      piece.number >= 1 && piece.count >= piece.number && name == piece_name(piece.stem, piece.number, piece.count);
  return sound ? std::optional(piece) : std::nullopt;
}

/// Where the metadata is: the first piece beside the named one, or the file itself.
std::filesystem::path first_piece(const std::filesystem::path& path) {
  const auto piece = parse_piece(path);
  return piece ? path.parent_path() / piece_name(piece->stem, 1, piece->count) : path;
}

bool multiply(std::uint64_t a, std::uint64_t b, std::uint64_t& product) {
  return !__builtin_mul_overflow(a, b, &product);
}

}  // namespace

/// Walks the header; every read is checked against the end of the file.
class GgufFile::Cursor {
 public:
  Cursor(const std::filesystem::path& path, std::span<const std::byte> bytes) : path_(path), bytes_(bytes) {}

  [[nodiscard]] std::size_t at() const { return at_; }
  [[nodiscard]] std::size_t left() const { return bytes_.size() - at_; }

  void seek(std::size_t at) { at_ = at; }

  const std::byte* take(std::uint64_t count, const std::string& what) {
    if (count > left()) {
      fail(what + " needs " + std::to_string(count) + " bytes at offset " + std::to_string(at_) + ", but only " +
           std::to_string(left()) + " are left: the file is truncated or damaged");
    }
    const std::byte* const from = bytes_.data() + at_;
    at_ += static_cast<std::size_t>(count);
    return from;
  }

  template <typename T>
  T read(const std::string& what) {
    return load_unaligned<T>(take(sizeof(T), what));
  }

  std::string_view read_string(const std::string& what) {
    const auto length = read<std::uint64_t>(what);
    const std::byte* const from = take(length, what);
    return {reinterpret_cast<const char*>(from), static_cast<std::size_t>(length)};
  }

  std::string read_name(const std::string& what) {
    const std::string_view name = read_string(what);
    if (name.empty() || name.size() > max_name) {
      fail(what + " has " + std::to_string(name.size()) + " bytes, expected 1 to " + std::to_string(max_name));
    }
    return std::string(name);
  }

  [[noreturn]] void fail(const std::string& what) const { throw ModelError(path_.string() + ": " + what); }

 private:
  const std::filesystem::path& path_;
  std::span<const std::byte> bytes_;
  std::size_t at_ = 0;
};

GgufFile::GgufFile(const std::filesystem::path& path) : GgufFile(first_piece(path), Piece{}) {
  if (const std::int64_t count = integer("split.count").value_or(1); count > 1) join_pieces(count);
}

GgufFile::GgufFile(const std::filesystem::path& path, Piece) : file_(path) {
  Cursor cursor(file_.path(), file_.bytes());
  if (cursor.read<std::uint32_t>("the magic number") != magic) {
    cursor.fail("not a GGUF file: it does not begin with \"GGUF\"");
  }
  version_ = cursor.read<std::uint32_t>("the version");
  if (version_ != 2 && version_ != 3) {
    cursor.fail("GGUF version " + std::to_string(version_) + " is not supported; expected 2 or 3, little-endian");
  }
  const auto tensor_count = cursor.read<std::uint64_t>("the tensor count");
  const auto value_count = cursor.read<std::uint64_t>("the metadata count");
  if (value_count > cursor.left() / least_key_value || tensor_count > cursor.left() / least_tensor) {
    cursor.fail("the header announces " + std::to_string(tensor_count) + " tensors and " + std::to_string(value_count) +
                " metadata entries, more than the file can hold");
  }
  read_metadata(cursor, value_count);
  read_tensors(cursor, tensor_count);
}

void GgufFile::join_pieces(std::int64_t count) {
  const auto require = [](const GgufFile& piece, bool holds, const std::string& what) {
    if (!holds) throw ModelError(piece.path().string() + ": " + what);
  };
  const auto name = parse_piece(path());
  require(*this, name && count <= max_pieces && name->count == count,
          "metadata \"split.count\" says that this is one of " + std::to_string(count) +
              " pieces; expected a name that ends in " + piece_name("", 1, std::min(count, max_pieces)));
  for (std::int64_t number = 1; number <= count; ++number) {
    if (number > 1) {
      const auto sibling = path().parent_path() / piece_name(name->stem, number, count);
      others_.push_back(GgufFile(sibling, Piece{}));
    }
    const GgufFile& piece = number == 1 ? *this : others_.back();
    const std::int64_t its_number = piece.integer("split.no").value_or(-1);
    const std::int64_t its_count = piece.integer("split.count").value_or(-1);
    require(piece, its_number == number - 1 && its_count == count,
            "metadata \"split.no\" and \"split.count\" are " + std::to_string(its_number) + " and " +
                std::to_string(its_count) + ", expected " + std::to_string(number - 1) + " and " +
                std::to_string(count));
  }
  for (GgufFile& piece : others_) {
    for (GgufTensor& tensor : piece.tensors_) {
      require(piece, by_name_.emplace(tensor.name, tensors_.size()).second,
              "tensor \"" + tensor.name + "\" occurs in an earlier piece too");
      tensors_.push_back(std::move(tensor));
    }
    piece.tensors_.clear();
    piece.by_name_.clear();
  }
  if (const auto total = integer("split.tensors.count")) {
    require(*this, *total == static_cast<std::int64_t>(tensors_.size()),
            "metadata \"split.tensors.count\" is " + std::to_string(*total) + ", but the pieces hold " +
                std::to_string(tensors_.size()) + " tensors");
  }
}

std::size_t GgufFile::size() const {
  std::size_t bytes = file_.bytes().size();
  for (const GgufFile& piece : others_) bytes += piece.size();
  return bytes;
}

void GgufFile::release_pages() const noexcept {
  file_.release_pages();
  for (const GgufFile& piece : others_) piece.release_pages();
}

std::size_t GgufFile::scalar_bytes(ValueType type) {
  switch (type) {
    case ValueType::u8:
    case ValueType::i8:
    case ValueType::boolean:
      return 1;
    case ValueType::u16:
    case ValueType::i16:
      return 2;
    case ValueType::u32:
    case ValueType::i32:
    case ValueType::f32:
      return 4;
    case ValueType::u64:
    case ValueType::i64:
    case ValueType::f64:
      return 8;
    case ValueType::string:
    case ValueType::array:
      break;
  }
  return 0;
}

GgufFile::Value GgufFile::read_value(Cursor& cursor, ValueType type, const std::string& key) {
  const std::string what = "metadata \"" + key + "\"";
  switch (type) {
    case ValueType::u8:
      return static_cast<std::int64_t>(cursor.read<std::uint8_t>(what));
    case ValueType::i8:
      return static_cast<std::int64_t>(cursor.read<std::int8_t>(what));
    case ValueType::u16:
      return static_cast<std::int64_t>(cursor.read<std::uint16_t>(what));
    case ValueType::i16:
      return static_cast<std::int64_t>(cursor.read<std::int16_t>(what));
    case ValueType::u32:
      return static_cast<std::int64_t>(cursor.read<std::uint32_t>(what));
    case ValueType::i32:
      return static_cast<std::int64_t>(cursor.read<std::int32_t>(what));
    case ValueType::i64:
      return cursor.read<std::int64_t>(what);
    case ValueType::u64:
      return cursor.read<std::uint64_t>(what);
    case ValueType::f32:
      return static_cast<double>(cursor.read<float>(what));
    case ValueType::f64:
      return cursor.read<double>(what);
    case ValueType::boolean:
      return cursor.read<std::uint8_t>(what) != 0;
    case ValueType::string:
      return cursor.read_string(what);
    case ValueType::array:
      break;
    default:
      cursor.fail(what + " has the unknown value type " + std::to_string(static_cast<std::uint32_t>(type)));
  }
  const auto element = static_cast<ValueType>(cursor.read<std::uint32_t>(what));
  const auto count = cursor.read<std::uint64_t>(what);
  const Array array{element, count, cursor.at()};
  if (element == ValueType::string) {
    if (count > cursor.left() / 8) {
      cursor.fail(what + " announces " + std::to_string(count) + " strings, more than the file can hold");
    }
    for (std::uint64_t i = 0; i < count; ++i) cursor.read_string(what);
  } else if (const std::size_t bytes = element > ValueType::f64 ? 0 : scalar_bytes(element); bytes > 0) {
    std::uint64_t total = 0;
    if (!multiply(count, bytes, total)) {
      cursor.fail(what + " announces " + std::to_string(count) + " elements, more than the file can hold");
    }
    cursor.take(total, what);
  } else {
    cursor.fail(what + " is an array of type " + std::to_string(static_cast<std::uint32_t>(element)) +
                ", expected numbers, booleans or strings");
  }
  return array;
}

void GgufFile::read_metadata(Cursor& cursor, std::uint64_t count) {
  for (std::uint64_t i = 0; i < count; ++i) {
    std::string key = cursor.read_name("the name of metadata entry " + std::to_string(i));
    const auto type = static_cast<ValueType>(cursor.read<std::uint32_t>("metadata \"" + key + "\""));
    Value value = read_value(cursor, type, key);
    if (metadata_.contains(key)) cursor.fail("metadata \"" + key + "\" occurs twice");
    metadata_.emplace(std::move(key), value);
  }
}

void GgufFile::read_tensors(Cursor& cursor, std::uint64_t count) {
  std::vector<std::uint64_t> offsets;
  for (std::uint64_t i = 0; i < count; ++i) {
    GgufTensor tensor;
    tensor.name = cursor.read_name("the name of tensor " + std::to_string(i));
    const std::string what = "tensor \"" + tensor.name + "\"";
    if (!by_name_.emplace(tensor.name, tensors_.size()).second) cursor.fail(what + " occurs twice");
    const auto dimensions = cursor.read<std::uint32_t>(what);
    if (dimensions == 0 || dimensions > max_dimensions) {
      cursor.fail(what + " has " + std::to_string(dimensions) + " dimensions, expected 1 to " +
                  std::to_string(max_dimensions));
    }
    for (std::uint32_t d = 0; d < dimensions; ++d) tensor.shape.push_back(cursor.read<std::uint64_t>(what));
    std::ranges::reverse(tensor.shape);
    const auto type = cursor.read<std::uint32_t>(what);
    tensor.type = find_gguf_type(type);
    if (tensor.type == nullptr) {
      cursor.fail(what + " has type " + gguf_type_name(type) + ", which is not supported; supported are " +
                  supported_gguf_types());
    }
    offsets.push_back(cursor.read<std::uint64_t>(what));
    tensors_.push_back(std::move(tensor));
  }
  place_tensors(cursor.at(), offsets);
}

void GgufFile::place_tensors(std::size_t header_end, const std::vector<std::uint64_t>& offsets) {
  const auto fail = [&](const std::string& what) { throw ModelError(path().string() + ": " + what); };
  const std::int64_t alignment = integer("general.alignment").value_or(default_alignment);
  if (alignment < 1 || alignment > (1 << 20) || !std::has_single_bit(static_cast<std::uint64_t>(alignment))) {
    fail("general.alignment is " + std::to_string(alignment) + ", expected a power of two up to 1048576");
  }
  const auto step = static_cast<std::uint64_t>(alignment);
  const std::uint64_t start = (header_end + step - 1) / step * step;
  const std::uint64_t end = file_.bytes().size();

  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    GgufTensor& tensor = tensors_[i];
    const std::string what = "tensor \"" + tensor.name + "\" of shape " + shape_text(tensor.shape);
    std::uint64_t elements = 1;
    bool fits = true;
    for (const std::uint64_t dimension : tensor.shape) {
      fits = fits && dimension > 0 && dimension <= std::numeric_limits<std::int32_t>::max() &&
             multiply(elements, dimension, elements);
    }
    if (!fits) fail(what + ": no tensor can have this shape");
    if (tensor.shape.back() % tensor.type->block != 0) {
      fail(what + ": rows of " + tensor.type->name + " must be a multiple of " + std::to_string(tensor.type->block) +
           " long");
    }
    std::uint64_t bytes = 0;
    fits = multiply(elements / tensor.type->block, tensor.type->block_bytes, bytes);
    if (offsets[i] % step != 0) {
      fail(what + ": offset " + std::to_string(offsets[i]) + " is not a multiple of the alignment, " +
           std::to_string(step));
    }
    if (!fits || start > end || offsets[i] > end - start || bytes > end - start - offsets[i]) {
      fail(what + ", " + tensor.type->name + ": expected " + std::to_string(bytes) + " bytes at offset " +
           std::to_string(offsets[i]) + " of the tensor data, but the file ends at " + std::to_string(end) +
           ": it is truncated or damaged");
    }
    tensor.data = file_.bytes().data() + start + offsets[i];
  }
}

const GgufTensor* GgufFile::tensor(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &tensors_[found->second];
}

const GgufFile::Value* GgufFile::find(const std::string& key) const {
  const auto found = metadata_.find(key);
  return found == metadata_.end() ? nullptr : &found->second;
}

void GgufFile::wrong_type(const std::string& key, const char* wanted, const Value& found) const {
  static constexpr const char* kinds[] = {"an integer", "an integer", "a float", "a boolean", "a string", "an array"};
  throw ModelError(path().string() + ": metadata \"" + key + "\": expected " + wanted + ", found " +
                   kinds[found.index()]);
}

std::optional<std::int64_t> GgufFile::integer(const std::string& key) const {
  const Value* const value = find(key);
  if (value == nullptr) return std::nullopt;
  if (const auto* small = std::get_if<std::int64_t>(value)) return *small;
  if (const auto* big = std::get_if<std::uint64_t>(value)) {
    if (*big <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      return static_cast<std::int64_t>(*big);
    }
    throw ModelError(path().string() + ": metadata \"" + key + "\" is " + std::to_string(*big) + ", which is absurd");
  }
  wrong_type(key, "an integer", *value);
}

std::optional<double> GgufFile::number(const std::string& key) const {
  const Value* const value = find(key);
  if (value == nullptr) return std::nullopt;
  if (const auto* real = std::get_if<double>(value)) return *real;
  if (value->index() > 1) wrong_type(key, "a number", *value);
  return static_cast<double>(*integer(key));
}

std::optional<bool> GgufFile::boolean(const std::string& key) const {
  const Value* const value = find(key);
  if (value == nullptr) return std::nullopt;
  if (const auto* flag = std::get_if<bool>(value)) return *flag;
  wrong_type(key, "a boolean", *value);
}

std::optional<std::string> GgufFile::string(const std::string& key) const {
  const Value* const value = find(key);
  if (value == nullptr) return std::nullopt;
  if (const auto* text = std::get_if<std::string_view>(value)) return std::string(*text);
  wrong_type(key, "a string", *value);
}

std::optional<GgufFile::Array> GgufFile::array(const std::string& key, const char* wanted) const {
  const Value* const value = find(key);
  if (value == nullptr) return std::nullopt;
  if (const auto* list = std::get_if<Array>(value)) return *list;
  wrong_type(key, wanted, *value);
}

std::optional<std::vector<std::string>> GgufFile::strings(const std::string& key) const {
  const auto list = array(key, "an array of strings");
  if (!list) return std::nullopt;
  if (list->type != ValueType::string) wrong_type(key, "an array of strings", *list);
  Cursor cursor(path(), file_.bytes());
  cursor.seek(list->at);
  std::vector<std::string> out;
  out.reserve(static_cast<std::size_t>(list->count));
  for (std::uint64_t i = 0; i < list->count; ++i) out.emplace_back(cursor.read_string(key));
  return out;
}

std::optional<std::vector<std::int32_t>> GgufFile::integers(const std::string& key) const {
  const auto list = array(key, "an array of 32-bit integers");
  if (!list) return std::nullopt;
  if (list->type != ValueType::i32 && list->type != ValueType::u32) {
    wrong_type(key, "an array of 32-bit integers", *list);
  }
  std::vector<std::int32_t> out(static_cast<std::size_t>(list->count));
  std::memcpy(out.data(), file_.bytes().data() + list->at, out.size() * sizeof out[0]);
  return out;
}

std::optional<std::vector<std::int32_t>> GgufFile::integers_for(const std::string& key, int count) const {
  const Value* const value = find(key);
  if (value == nullptr) return std::nullopt;
  if (std::holds_alternative<Array>(*value)) {
    auto list = integers(key);
    if (list->size() >= static_cast<std::size_t>(count)) return list;
    throw ModelError(path().string() + ": metadata \"" + key + "\" lists " + std::to_string(list->size()) +
                     " numbers, expected " + std::to_string(count));
  }
  const std::int64_t one = *integer(key);
  if (one < 0 || one > std::numeric_limits<std::int32_t>::max()) {
    throw ModelError(path().string() + ": metadata \"" + key + "\" is " + std::to_string(one) +
                     ", expected 0 to 2147483647");
  }
  return std::vector<std::int32_t>(static_cast<std::size_t>(count), static_cast<std::int32_t>(one));
}

std::optional<std::vector<bool>> GgufFile::booleans(const std::string& key) const {
  const auto list = array(key, "an array of booleans");
  if (!list) return std::nullopt;
  if (list->type != ValueType::boolean) wrong_type(key, "an array of booleans", *list);
  std::vector<bool> out;
  for (const std::byte value : file_.bytes().subspan(list->at, static_cast<std::size_t>(list->count))) {
    out.push_back(value != std::byte{0});
  }
  return out;
}

std::optional<std::vector<float>> GgufFile::floats(const std::string& key) const {
  const auto list = array(key, "an array of 32-bit floats");
  if (!list) return std::nullopt;
  if (list->type != ValueType::f32) wrong_type(key, "an array of 32-bit floats", *list);
  std::vector<float> out(static_cast<std::size_t>(list->count));
  std::memcpy(out.data(), file_.bytes().data() + list->at, out.size() * sizeof out[0]);
  return out;
}

}  // namespace galley::models
