#include "api/service.h"

#include "ops/error.h"

namespace galley::api {

void Service::set_model(std::shared_ptr<const ServedModel> model) {
  const std::lock_guard lock(mutex_);
  model_ = std::move(model);
}

std::shared_ptr<const ServedModel> Service::model() const {
  const std::lock_guard lock(mutex_);
  return model_;
}

std::shared_ptr<const ServedModel> Service::ready_model() const {
  auto model = this->model();
  if (!model) throw Error(503, "the model is still loading; try again in a moment", "loading");
  if (!model->engine->healthy()) throw Error(503, "the engine has failed; the server must be restarted", "engine_dead");
  if (draining()) throw Error(503, "the server is shutting down and takes no new requests", "draining");
  return model;
}

}  // namespace galley::api
