// Carries an Api over HTTP, by cpp-httplib: sockets, headers, time-outs and the threads of the connections.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>

#include "common/serving/api.h"

namespace common {

struct HttpOptions {
  std::string host = "127.0.0.1";
  int port = 8080;                       // 0: any that is free
  std::size_t max_body_bytes = 1 << 20;  // of a request
  // For a client to send the next part of its request, or to read the next part of the reply. The whole request, from
  // the reply before it or the connection's beginning, may take kWholeRequest times as long.
  std::chrono::milliseconds timeout{5000};
  int max_connections = 1024;  // served at once, each by a thread; others wait
};

inline constexpr int kWholeRequest = 4;

// "127.0.0.1:8080", ":8080", "[::1]:8080". Throws InputError for anything else.
HttpOptions parse_address(const std::string& address);

// The package to install for HTTP, if this program was built without it; empty: HTTP is there.
std::string missing_http_package();

class HttpServer {
 public:
  // Binds to the address and begins to serve. The api must outlive the object. Throws InputError if the address can't
  // be had, or if the program was built without HTTP.
  HttpServer(Api& api, const HttpOptions& options);
  // Accepts no more connections, and waits for the replies that are being sent.
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  int port() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace common
