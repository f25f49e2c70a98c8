// Serves an Api over HTTP/1.1: sockets, time-outs, and the threads that answer. It has only what an API needs: no
// ranges, no compression, no transfer encoding except chunks.
//
// Libraries were tried. libmicrohttpd 0.9.75 takes 33 KiB by default for an idle connection (this one 5), and of 28
// malformed or smuggled requests it refuses 10 as this server's tests demand. Boost.Beast 1.74 takes 3 KiB, needs no
// thread for a client that does not read, and refuses 22 of them, but a file that includes it compiles for 32 seconds
// (this one 5), and the account of memory and the checks of the other 6 would stay this server's own.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "common/serving/api.h"
#include "common/serving/memory_account.h"
#include "common/serving/request_log.h"

namespace common {

struct HttpOptions {
  std::string host = "127.0.0.1";
  int port = 8080;                       // 0: any free port
  std::size_t max_body_bytes = 1 << 20;  // in a request
  // The time for a client to send the next part of its request, or to read the next part of the reply. The whole
  // request, counted from the previous reply or the connection's beginning, may take kWholeRequest times as long.
  std::chrono::milliseconds timeout{5000};
  int max_connections = 1024;  // served at once, each by a thread; at most three times that number wait
  // Bodies are in it while they come in and are read. Null: MemoryAccount::of_this_machine().
  std::shared_ptr<MemoryAccount> memory = nullptr;
  // Called with each request that has been answered, by several threads at once.
  std::function<void(const AnsweredRequest&)> on_answered = nullptr;
};

inline constexpr int kWholeRequest = 4;

// "127.0.0.1:8080", ":8080", "[::1]:8080". Throws InputError for anything else.
HttpOptions parse_address(const std::string& address);

class HttpServer {
 public:
  // Binds to the address; until serve() is called, all replies say that the server is starting. Throws InputError if it
  // can't bind to the address.
  explicit HttpServer(const HttpOptions& options);
  // The same, and serves.
  HttpServer(Api& api, const HttpOptions& options);
  // Accepts no more connections, refuses requests that have come in part, and waits for the replies in flight: a second
  // for a client that does not read its reply, or does not close its connection behind it, and one time-out at most.
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  // Serves from now on. The api must outlive the object.
  void serve(Api& api);
  // The end is near: from now on, a client may stop reading for a second, no longer for a time-out, and each connection
  // is closed after its reply.
  void prepare_to_end();

  int port() const;
  const std::shared_ptr<MemoryAccount>& memory() const;
  bool is_on_loopback() const;  // only this machine reaches the address

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace common
