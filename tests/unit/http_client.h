// A plain blocking client over POSIX sockets, so that tests decide every byte and every close.
#pragma once
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

namespace galley::test {

class Client {
 public:
  /// `receive_buffer`: SO_RCVBUF in bytes; 0: the system's.
  explicit Client(std::uint16_t port, int receive_buffer = 0) : fd_(::socket(AF_INET, SOCK_STREAM, 0)) {
    if (fd_ < 0) throw std::runtime_error("socket");
    if (receive_buffer > 0) ::setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof receive_buffer);
    const timeval timeout{20, 0};
    ::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (::connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
      ::close(fd_);
      throw std::runtime_error("connect");
    }
  }
  ~Client() { close(); }
  Client(Client&& other) noexcept : fd_(std::exchange(other.fd_, -1)), buffer_(std::move(other.buffer_)) {}
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;
  Client& operator=(Client&&) = delete;

  void send(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n <= 0) return;  // the server has closed; what it said can still be read
      bytes.remove_prefix(static_cast<std::size_t>(n));
    }
  }
  void get(const std::string& path, const std::string& headers = {}) {
    send("GET " + path + " HTTP/1.1\r\nHost: t\r\n" + headers + "\r\n");
  }
  void post(const std::string& path, const std::string& body, const std::string& headers = {}) {
    send("POST " + path + " HTTP/1.1\r\nHost: t\r\nContent-Length: " + std::to_string(body.size()) + "\r\n" + headers +
         "\r\n" + body);
  }

  struct Answer {
    int status = 0;  ///< 0: the connection ended before a whole answer
    std::string head;
    std::string body;
    [[nodiscard]] bool has(std::string_view header) const { return head.find(header) != std::string::npos; }
  };
  /// One whole answer, chunked or with a length (or none, after HEAD).
  Answer read(bool head_only = false) {
    Answer answer;
    const auto end = wait_for("\r\n\r\n");
    if (end == std::string::npos) return answer;
    answer.head = buffer_.substr(0, end + 2);
    buffer_.erase(0, end + 4);
    const int status = std::stoi(answer.head.substr(9, 3));
    if (const auto at = answer.head.find("Content-Length: "); at != std::string::npos && !head_only) {
      const auto size = static_cast<std::size_t>(std::stoul(answer.head.substr(at + 16)));
      while (buffer_.size() < size) {
        if (!receive()) return answer;
      }
      answer.body = buffer_.substr(0, size);
      buffer_.erase(0, size);
    } else if (answer.has("Transfer-Encoding: chunked")) {
      while (true) {
        const std::string chunk = read_chunk();
        if (chunk.empty()) break;
        answer.body += chunk;
      }
      if (chunk_error_) return answer;
    }
    answer.status = status;
    return answer;
  }
  /// One chunk's data; "" for the last one, or when the connection ended (then chunk_error()).
  std::string read_chunk() {
    const auto line = wait_for("\r\n");
    if (line == std::string::npos) {
      chunk_error_ = true;
      return {};
    }
    const auto size = static_cast<std::size_t>(std::stoul(buffer_.substr(0, line), nullptr, 16));
    while (buffer_.size() < line + 2 + size + 2) {
      if (!receive()) {
        chunk_error_ = true;
        return {};
      }
    }
    std::string data = buffer_.substr(line + 2, size);
    buffer_.erase(0, line + 2 + size + 2);
    return data;
  }
  [[nodiscard]] bool chunk_error() const { return chunk_error_; }

  /// Reads until `text` has come; its position, npos when the connection ended first.
  std::size_t wait_for(std::string_view text) {
    while (true) {
      const auto at = buffer_.find(text);
      if (at != std::string::npos) return at;
      if (!receive()) return std::string::npos;
    }
  }
  /// The head of an answer, when its body is a stream.
  std::string read_head() {
    const auto end = wait_for("\r\n\r\n");
    if (end == std::string::npos) return {};
    std::string head = buffer_.substr(0, end + 2);
    buffer_.erase(0, end + 4);
    return head;
  }
  /// Everything until the connection ends.
  std::string read_all() {
    while (receive()) {
    }
    return std::exchange(buffer_, {});
  }

  void half_close() { ::shutdown(fd_, SHUT_WR); }
  void close() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }
  /// Closes with a reset.
  void abort() {
    const linger hard{1, 0};
    ::setsockopt(fd_, SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
    close();
  }

 private:
  bool receive() {
    std::array<char, 65536> bytes;
    const ssize_t n = ::recv(fd_, bytes.data(), bytes.size(), 0);
    if (n <= 0) return false;
    buffer_.append(bytes.data(), static_cast<std::size_t>(n));
    return true;
  }

  int fd_;
  std::string buffer_;
  bool chunk_error_ = false;
};

/// Waits until `condition` holds; false when it did not in time.
inline bool eventually(const std::function<bool()>& condition,
                       std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

}  // namespace galley::test
