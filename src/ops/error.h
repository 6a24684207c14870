// The error type of every room: a message a person can act on, and the HTTP status it means at the front door.
#pragma once
#include <stdexcept>
#include <string>
#include <utility>

namespace galley {

class Error : public std::runtime_error {
 public:
  /// `status`: HTTP status (400 bad request, 404, 413, 429, 503 …). `code`: a stable machine-readable word, may be
  /// empty. `param`: the request field or command-line flag at fault, may be empty.
  Error(int status, const std::string& message, std::string code = {}, std::string param = {})
      : std::runtime_error(message), status_(status), code_(std::move(code)), param_(std::move(param)) {}

  [[nodiscard]] int status() const noexcept { return status_; }
  [[nodiscard]] const std::string& code() const noexcept { return code_; }
  [[nodiscard]] const std::string& param() const noexcept { return param_; }

 private:
  int status_;
  std::string code_;
  std::string param_;
};

/// The model's files can't be used: names the file, the tensor or key, what was expected and what was found.
class ModelError : public Error {
 public:
  explicit ModelError(const std::string& message) : Error(500, message, "model_error") {}
};

}  // namespace galley
