// Serves an Api over HTTP/1.1: sockets, time-outs, and the threads that answer. It has only what an API needs: no
// ranges, no compression, no transfer encoding except chunks.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>

#include "common/serving/api.h"

namespace common {

struct HttpOptions {
  std::string host = "127.0.0.1";
  int port = 8080;                       // 0: any free port
  std::size_t max_body_bytes = 1 << 20;  // in a request
  // The time for a client to send the next part of its request, or to read the next part of the reply. The whole
  // request, counted from the previous reply or the connection's beginning, may take kWholeRequest times as long.
  std::chrono::milliseconds timeout{5000};
  int max_connections = 1024;  // served at once, each by a thread; at most three times as many others wait
};

inline constexpr int kWholeRequest = 4;

// "127.0.0.1:8080", ":8080", "[::1]:8080". Throws InputError for anything else.
HttpOptions parse_address(const std::string& address);

class HttpServer {
 public:
  // Binds to the address and begins to serve. The api must outlive the object. Throws InputError if it can't bind to
  // the address.
  HttpServer(Api& api, const HttpOptions& options);
  // Accepts no more connections, and waits for the replies in flight; for clients that do not read their replies, it
  // waits one time-out.
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  int port() const;
  bool is_on_loopback() const;  // only this machine reaches the address

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace common
