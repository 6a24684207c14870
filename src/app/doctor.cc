#include <fmt/format.h>
#include <mlx/version.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "app/model_files.h"
#include "app/options.h"
#include "app/version.h"
#include "kv/paged.h"
#include "models/model.h"
#include "ops/kernels/isa.h"

namespace galley::app {

namespace {

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown processor";
}

}  // namespace

int doctor(ModelOptions options) {
  options.resolve();
  constexpr double kGb = 1e9;
  fmt::print("galley {}\n", kVersion);
  fmt::print("machine       {}, {} processors usable, {:.1f} GB of memory free\n", processor_name(),
             models::usable_processors(), static_cast<double>(models::available_memory()) / kGb);
  fmt::print("kernels       {}\n", kernels::isa_report());
  fmt::print("MLX           {} (built against {}.{}.{})\n", mlx::core::version(), MLX_VERSION_MAJOR, MLX_VERSION_MINOR,
             MLX_VERSION_PATCH);
  const bool compiler = std::system("command -v g++ >/dev/null 2>&1") == 0;
  fmt::print("mx::compile   {}\n", compiler
                                       ? "available (g++ found); used by --kernels stock only"
                                       : "runs uncompiled: g++ was not found. --kernels stock is then not bit-equal "
                                         "with mlx-lm; install it with: apt-get install g++");
  std::string families;
  for (const std::string& name : models::model_families()) families += (families.empty() ? "" : ", ") + name;
  fmt::print("families      {}\n", families);
  if (options.model.empty()) return 0;

  const auto checkpoint = models::open_checkpoint(options.model);
  const models::Config& config = checkpoint->config();
  fmt::print("\nmodel         {} ({}), {}, {:.1f} MB on disk\n", options.model, config.family, checkpoint->format(),
             static_cast<double>(checkpoint->file_bytes()) / 1e6);
  fmt::print("shape         {} layers, hidden {}, {} heads over {} KV heads of {}, vocabulary {}, context {}\n",
             config.layers, config.hidden, config.heads, config.kv_heads, config.head_dim, config.vocab,
             config.context);
  const std::size_t per_token = static_cast<std::size_t>(config.layers) * 2 *
                                static_cast<std::size_t>(config.kv_heads) * static_cast<std::size_t>(config.head_dim) *
                                (options.runtime.kv_dtype == "f32" ? 4 : 2);
  const int context = options.runtime.context > 0 ? options.runtime.context : config.context;
  fmt::print("KV            {:.1f} KB a token as {}; {:.2f} GB for {} row{} of {} tokens\n",
             static_cast<double>(per_token) / 1e3, options.runtime.kv_dtype,
             static_cast<double>(per_token) * context * options.runtime.batch / kGb, options.runtime.batch,
             options.runtime.batch == 1 ? "" : "s", context);
  return 0;
}

}  // namespace galley::app
