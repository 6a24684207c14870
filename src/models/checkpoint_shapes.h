// How loaders report a tensor that is absent or not what the config says: file, tensor, expected, found.
#pragma once
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

namespace galley::models {

/// "[576, 1536]", outermost dimension first.
std::string shape_text(std::span<const std::uint64_t> shape);

[[noreturn]] void throw_shape_mismatch(const std::filesystem::path& file, const std::string& tensor,
                                       std::span<const std::uint64_t> expected, std::span<const std::uint64_t> found);
[[noreturn]] void throw_missing_tensor(const std::filesystem::path& file, const std::string& tensor,
                                       std::span<const std::uint64_t> expected);

/// Throws unless `found` equals `expected`.
void require_shape(const std::filesystem::path& file, const std::string& tensor,
                   std::span<const std::uint64_t> expected, std::span<const std::uint64_t> found);

}  // namespace galley::models
