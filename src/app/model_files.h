// A checkpoint with its text side, opened for a command.
#pragma once
#include <memory>
#include <string>

#include "models/checkpoint.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace galley::app {

struct ModelFiles {
  std::shared_ptr<const models::Checkpoint> checkpoint;
  std::shared_ptr<const text::Tokenizer> tokenizer;
  std::shared_ptr<const text::ChatTemplate> chat_template;  ///< null: the model has none
  std::string id;                                           ///< the file's or folder's name
};

/// Throws ModelError.
ModelFiles open_model(const std::string& path);

}  // namespace galley::app
