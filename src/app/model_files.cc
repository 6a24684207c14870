#include "app/model_files.h"

#include <filesystem>

#include "ops/error.h"

namespace galley::app {

ModelFiles open_model(const std::string& path) {
  ModelFiles files;
  files.checkpoint = models::open_checkpoint(path);
  const text::Assets& assets = files.checkpoint->assets();
  try {
    files.tokenizer = text::make_tokenizer(assets);
    files.chat_template = text::make_chat_template(assets);
  } catch (const ModelError& error) {
    throw ModelError(path + ": " + error.what());
  }
  std::filesystem::path name = std::filesystem::path(path);
  if (!name.has_filename()) name = name.parent_path();
  files.id = name.extension() == ".gguf" ? name.stem().string() : name.filename().string();
  return files;
}

}  // namespace galley::app
