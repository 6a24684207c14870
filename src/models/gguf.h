// Reader of the GGUF container, versions 2 and 3: metadata and tensors, whatever model they describe.
//   https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "models/gguf_types.h"
#include "models/mapped_file.h"

namespace galley::models {

struct GgufTensor {
  std::string name;
  std::vector<std::uint64_t> shape;  ///< outermost dimension first, as everywhere here; the file has it the other way
  const GgufType* type = nullptr;
  const std::byte* data = nullptr;  ///< inside the mapping, type->block_bytes * (elements / type->block) bytes
};

/// One file, or all the pieces of a split one ("name-00001-of-00003.gguf", as llama-gguf-split leaves them) seen as
/// one: the first piece's metadata, every piece's tensors. Whichever piece is named, all are opened.
///
/// The whole header is checked on opening: every count, length, offset and extent lies inside the file, names are
/// unique, types are known, pieces belong together. Anything else is a ModelError naming the file and the key or
/// tensor.
class GgufFile {
 public:
  explicit GgufFile(const std::filesystem::path& path);

  /// Of the first piece.
  [[nodiscard]] const std::filesystem::path& path() const { return file_.path(); }
  /// Bytes on disk, of all pieces.
  [[nodiscard]] std::size_t size() const;
  [[nodiscard]] std::uint32_t version() const { return version_; }
  void release_pages() const noexcept;

  [[nodiscard]] const std::vector<GgufTensor>& tensors() const { return tensors_; }
  /// Null when absent.
  [[nodiscard]] const GgufTensor* tensor(const std::string& name) const;

  // Metadata. nullopt when the key is absent; ModelError naming key, expected and found type when it is of another
  // kind (any width of integer will do, and any number where a float is wanted).
  [[nodiscard]] bool has(const std::string& key) const { return metadata_.contains(key); }
  [[nodiscard]] std::optional<std::int64_t> integer(const std::string& key) const;
  [[nodiscard]] std::optional<double> number(const std::string& key) const;
  [[nodiscard]] std::optional<bool> boolean(const std::string& key) const;
  [[nodiscard]] std::optional<std::string> string(const std::string& key) const;
  [[nodiscard]] std::optional<std::vector<std::string>> strings(const std::string& key) const;
  [[nodiscard]] std::optional<std::vector<std::int32_t>> integers(const std::string& key) const;
  [[nodiscard]] std::optional<std::vector<float>> floats(const std::string& key) const;
  [[nodiscard]] std::optional<std::vector<bool>> booleans(const std::string& key) const;
  /// An array of integers, or `count` times the one integer that is there.
  [[nodiscard]] std::optional<std::vector<std::int32_t>> integers_for(const std::string& key, int count) const;

 private:
  enum class ValueType : std::uint32_t { u8, i8, u16, i16, u32, i32, f32, boolean, string, array, u64, i64, f64 };
  struct Array {
    ValueType type;
    std::uint64_t count;
    std::size_t at;  ///< offset of the first element, already known to lie inside the file with all others
  };
  using Value = std::variant<std::int64_t, std::uint64_t, double, bool, std::string_view, Array>;
  class Cursor;

  struct Piece {};  // opens one file alone, whatever it says of being split
  GgufFile(const std::filesystem::path& path, Piece);

  void join_pieces(std::int64_t count);
  void read_metadata(Cursor& cursor, std::uint64_t count);
  void read_tensors(Cursor& cursor, std::uint64_t count);
  void place_tensors(std::size_t header_end, const std::vector<std::uint64_t>& offsets);
  static Value read_value(Cursor& cursor, ValueType type, const std::string& key);
  static std::size_t scalar_bytes(ValueType type);
  [[nodiscard]] const Value* find(const std::string& key) const;
  [[nodiscard]] std::optional<Array> array(const std::string& key, const char* wanted) const;
  [[noreturn]] void wrong_type(const std::string& key, const char* wanted, const Value& found) const;

  MappedFile file_;
  std::uint32_t version_ = 0;
  std::map<std::string, Value> metadata_;
  std::vector<GgufTensor> tensors_;
  std::map<std::string, std::size_t> by_name_;
  std::vector<GgufFile> others_;  ///< the second piece and those after it; they own their mappings
};

}  // namespace galley::models
