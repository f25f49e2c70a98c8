// A minimal client of a server on this machine: it sends bytes and reads bytes.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace tests {

class HttpConnection {
 public:
  // receive_buffer: bytes that the system keeps for a client that does not read; 0: the system's default.
  explicit HttpConnection(int port, int receive_buffer = 0) : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    if (receive_buffer > 0) {
      setsockopt(socket_, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof(receive_buffer));
    }
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (socket_ < 0 || connect(socket_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
      throw std::runtime_error("can't connect");
    }
  }
  HttpConnection(HttpConnection&& other) noexcept : socket_(std::exchange(other.socket_, -1)) {}
  HttpConnection& operator=(HttpConnection&&) = delete;
  ~HttpConnection() { close(); }

  void close() {
    if (socket_ >= 0) {
      ::close(std::exchange(socket_, -1));
    }
  }

  // Sends no more, but reads on.
  void close_half() { ::shutdown(socket_, SHUT_WR); }

  // False: the other end has closed the connection.
  bool send(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) {
        return false;
      }
      bytes.remove_prefix(static_cast<std::size_t>(sent));
    }
    return true;
  }

  // Some bytes; none at the end, or if none come within the timeout.
  std::string read_some(int timeout_milliseconds = 10'000) {
    pollfd state = {socket_, POLLIN, 0};
    std::array<char, 4096> bytes = {};
    if (poll(&state, 1, timeout_milliseconds) <= 0) {
      return "";
    }
    const ssize_t count = recv(socket_, bytes.data(), bytes.size(), 0);
    return {bytes.data(), static_cast<std::size_t>(count > 0 ? count : 0)};
  }

  // Whether the other end has closed the connection, and everything it sent has been read.
  bool is_closed() const {
    char byte = 0;
    const ssize_t count = recv(socket_, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return count == 0 || (count < 0 && errno != EAGAIN && errno != EWOULDBLOCK);
  }

  // Reads until the text ends with `end`, or until nothing more comes.
  std::string read_until(std::string_view end, int timeout_milliseconds = 10'000) {
    std::string text;
    while (text.find(end) == std::string::npos) {
      const std::string piece = read_some(timeout_milliseconds);
      if (piece.empty()) {
        break;
      }
      text += piece;
    }
    return text;
  }

 private:
  int socket_;
};

struct HttpReply {
  int status = 0;  // 0: there was no reply
  std::string head;
  std::string body;  // with the framing of chunks, if it has any
};

inline std::string http_get(const std::string& path) { return "GET " + path + " HTTP/1.1\r\nHost: localhost\r\n\r\n"; }

inline std::string http_post(const std::string& path, const std::string& body) {
  return "POST " + path + " HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: " +
         std::to_string(body.size()) + "\r\n\r\n" + body;
}

// Reads one reply, which has a Content-Length or comes in chunks.
inline HttpReply read_reply(HttpConnection& connection) {
  HttpReply reply;
  const std::string text = connection.read_until("\r\n\r\n");
  const std::size_t end = text.find("\r\n\r\n");
  if (end == std::string::npos) {
    return reply;
  }
  reply.head = text.substr(0, end + 2);
  reply.body = text.substr(end + 4);
  constexpr std::size_t kStatusBegin = 9;  // after "HTTP/1.1 "
  reply.status = std::atoi(reply.head.substr(kStatusBegin, 3).c_str());
  if (const std::size_t at = reply.head.find("Content-Length: "); at != std::string::npos) {
    const auto length = static_cast<std::size_t>(std::atoll(reply.head.c_str() + at + 16));
    while (reply.body.size() < length) {
      const std::string piece = connection.read_some();
      if (piece.empty()) {
        break;
      }
      reply.body += piece;
    }
  } else if (reply.head.find("chunked") != std::string::npos && reply.body.find("\r\n0\r\n\r\n") == std::string::npos) {
    reply.body += connection.read_until("0\r\n\r\n");
  }
  return reply;
}

}  // namespace tests
