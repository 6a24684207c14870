// What a person sees once the server is ready.
#pragma once
#include <string>

#include "app/model_files.h"
#include "app/options.h"

namespace galley::app {

/// Model, size, lane mode, kernels, KV plan, URL and a command to paste.
std::string ready_card(const ServeOptions& options, const ModelFiles& files, const models::Runtime& runtime, int port);

}  // namespace galley::app
