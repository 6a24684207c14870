#include "models/fingerprint.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <vector>

#include "ops/error.h"

namespace galley::models {
namespace {

/// FNV-1a, 64 bits (Fowler, Noll, Vo).
class Hash {
 public:
  void add(const char* data, std::size_t size) {
    for (std::size_t i = 0; i < size; ++i) state_ = (state_ ^ static_cast<unsigned char>(data[i])) * 0x100000001B3ULL;
  }
  void add(const std::string& text) { add(text.c_str(), text.size() + 1); }
  [[nodiscard]] std::uint64_t value() const { return state_; }

 private:
  std::uint64_t state_ = 0xCBF29CE484222325ULL;
};

void add_file(Hash& hash, const std::filesystem::path& path) {
  constexpr std::uint64_t kHead = 65536, kSample = 4096, kSamples = 1024;
  std::error_code error;
  const std::uint64_t size = std::filesystem::file_size(path, error);
  std::ifstream file(path, std::ios::binary);
  if (error || !file) throw ModelError(path.string() + ": can't be read");
  hash.add(path.filename().string());
  hash.add(std::to_string(size));
  std::vector<char> buffer(kHead);
  const auto add_at = [&](std::uint64_t at, std::uint64_t n) {
    n = std::min(n, size - at);
    file.seekg(static_cast<std::streamoff>(at));
    file.read(buffer.data(), static_cast<std::streamsize>(n));
    if (!file) throw ModelError(path.string() + ": can't be read to its end");
    hash.add(buffer.data(), n);
  };
  add_at(0, kHead);
  const std::uint64_t step = std::max(kSample, size / kSamples);
  for (std::uint64_t at = std::min(kHead, size); at < size; at += step) add_at(at, kSample);
}

}  // namespace

std::string fingerprint(const std::filesystem::path& model) {
  std::vector<std::filesystem::path> files;
  if (std::filesystem::is_directory(model)) {
    for (const auto& entry : std::filesystem::directory_iterator(model)) {
      if (entry.path().extension() == ".safetensors" || entry.path().filename() == "config.json") {
        files.push_back(entry.path());
      }
    }
    std::ranges::sort(files);
  } else {
    files.push_back(model);
  }
  Hash hash;
  for (const auto& file : files) add_file(hash, file);
  return fmt::format("{:016x}", hash.value());
}

}  // namespace galley::models
