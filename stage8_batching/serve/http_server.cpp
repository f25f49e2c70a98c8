#include "http_server.h"

#include <charconv>

#include "common/base/check.h"
#include "common/base/text.h"

#ifdef COURSE_HTTPLIB
#include <httplib.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>
#endif

namespace stage8 {

HttpOptions parse_address(const std::string& address) {
  HttpOptions options;
  const std::size_t colon = address.rfind(':');
  const std::string port = colon == std::string::npos ? "" : address.substr(colon + 1);
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), options.port);
  if (error != std::errc() || end != port.data() + port.size() || options.port < 0 || options.port > 65535) {
    throw common::InputError("--http takes an address like 127.0.0.1:8080, not " + common::quote(address));
  }
  std::string host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  options.host = host.empty() ? options.host : host;
  return options;
}

#ifndef COURSE_HTTPLIB

std::string missing_http_package() { return "libcpp-httplib-dev"; }

struct HttpServer::Impl {};

HttpServer::HttpServer(Api&, const HttpOptions&) {
  throw common::InputError("this program was built without HTTP: install " + missing_http_package() +
                           ", then configure and build again");
}
HttpServer::~HttpServer() = default;
int HttpServer::port() const { return 0; }

#else

namespace {

// The threads of the connections, made as they are needed.
class ConnectionThreads : public httplib::TaskQueue {
 public:
  explicit ConnectionThreads(int max_threads) : max_threads_(static_cast<std::size_t>(max_threads)) {}

  // void or bool, whether it was taken: versions differ.
  using Enqueued = decltype(std::declval<httplib::TaskQueue&>().enqueue(std::declval<std::function<void()>>()));
  Enqueued enqueue(std::function<void()> task) override {
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
      if (num_idle_ < tasks_.size() && threads_.size() < max_threads_) {
        threads_.emplace_back([this] { work(); });
      }
    }
    wake_.notify_one();
    return static_cast<Enqueued>(true);
  }

  void shutdown() override {
    {
      const std::lock_guard lock(mutex_);
      is_ending_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) {
      thread.join();
    }
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      num_idle_ += 1;
      wake_.wait(lock, [&] { return !tasks_.empty() || is_ending_; });
      num_idle_ -= 1;
      if (tasks_.empty()) {
        return;
      }
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  std::size_t max_threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  std::vector<std::thread> threads_;
  std::size_t num_idle_ = 0;
  bool is_ending_ = false;
};

// The socket whose other end is this address, or -1. The library tells a handler the address alone, and without the
// socket it would go unnoticed that a client has hung up before its reply begins.
int find_socket(const std::string& address, int port) {
  constexpr int kMaxSockets = 1 << 14;
  const std::string wanted = std::to_string(port);
  for (int socket = 3; socket < kMaxSockets; ++socket) {
    sockaddr_storage peer = {};
    socklen_t size = sizeof(peer);
    std::array<char, NI_MAXHOST> host = {};
    std::array<char, NI_MAXSERV> service = {};
    auto* const name = reinterpret_cast<sockaddr*>(&peer);  // the sockets' interface is like that
    if (getpeername(socket, name, &size) == 0 &&
        getnameinfo(name, size, host.data(), host.size(), service.data(), service.size(),
                    NI_NUMERICHOST | NI_NUMERICSERV) == 0 &&
        wanted == service.data() && address == host.data()) {
      return socket;
    }
  }
  return -1;
}

bool has_hung_up(int socket) {
  pollfd state = {socket, POLLIN, 0};
  if (socket < 0 || poll(&state, 1, 0) <= 0) {
    return false;
  }
  char byte = 0;
  return recv(socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0 || (state.revents & (POLLERR | POLLNVAL)) != 0;
}

ApiRequest api_request(const httplib::Request& request) {
  return {request.method,
          request.path,
          request.body,
          request.get_header_value("Authorization"),
          request.get_header_value("Content-Type"),
          request.get_header_value("Origin"),
          request.get_header_value("Host")};
}

void send(ApiReply reply, httplib::Response& response) {
  response.status = reply.status;
  for (const auto& [name, value] : reply.headers) {
    response.set_header(name, value);
  }
  if (reply.stream == nullptr) {
    response.set_content(reply.body, reply.content_type);
    return;
  }
  const std::shared_ptr<ReplyBody> stream = std::move(reply.stream);
  response.set_chunked_content_provider(reply.content_type, [stream](std::size_t, httplib::DataSink& sink) {
    std::string text;
    const bool goes_on = stream->read(text);
    // is_writable() waits until the client has read enough, up to the time-out. False ends the connection, and with it
    // the stream.
    if (!sink.is_writable() || (!text.empty() && !sink.write(text.data(), text.size()))) {
      return false;
    }
    if (!goes_on) {
      sink.done();
    }
    return true;
  });
}

}  // namespace

struct HttpServer::Impl {
  httplib::Server server;
  int listening_socket = -1;
  int port = 0;
  std::thread thread;
};

std::string missing_http_package() { return ""; }

HttpServer::HttpServer(Api& api, const HttpOptions& options) : impl_(std::make_unique<Impl>()) {
  constexpr int kMaxPathLength = 256;            // longer ones would be matched by a recursive regular expression
  constexpr std::size_t kMaxKeptAlive = 10'000;  // requests of one connection
  httplib::Server& server = impl_->server;
  server.new_task_queue = [threads = options.max_connections] { return new ConnectionThreads(threads); };
  server.set_socket_options([impl = impl_.get()](socket_t socket) {
    const int yes = 1;
    setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
    // What the system keeps for a client that does not read; otherwise megabytes for each of them.
    const int send_buffer = 1 << 17;
    setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &send_buffer, sizeof(send_buffer));
    impl->listening_socket = socket;
  });
  server.set_tcp_nodelay(true);
  server.set_read_timeout(options.timeout);
  server.set_write_timeout(options.timeout);
  server.set_keep_alive_timeout(std::chrono::ceil<std::chrono::seconds>(options.timeout).count());
  server.set_keep_alive_max_count(kMaxKeptAlive);
  server.set_payload_max_length(options.max_body_bytes);
  const auto answer = [&api](const httplib::Request& request, httplib::Response& response) {
    int socket = -2;  // not looked for yet
    const auto is_gone = [&] {
      socket = socket == -2 ? find_socket(request.remote_addr, request.remote_port) : socket;
      return has_hung_up(socket);
    };
    send(api.handle(api_request(request), is_gone), response);
  };
  // Before the body is read: what has none, and what is refused.
  server.set_pre_routing_handler([answer](const httplib::Request& request, httplib::Response& response) {
    using Routed = httplib::Server::HandlerResponse;
    if (request.path.size() > kMaxPathLength) {
      send(error_reply(404, "there is no such path"), response);
      return Routed::Handled;
    }
    if (request.has_header("Content-Encoding")) {  // a small body could become a huge one
      send(error_reply(415, "compressed bodies are not supported"), response);
      response.set_header("Connection", "close");
      return Routed::Handled;
    }
    if (request.method != "POST") {
      answer(request, response);
      return Routed::Handled;
    }
    return Routed::Unhandled;
  });
  server.Post(".*", answer);
  // The library's own errors have a status and no body.
  server.set_error_handler([](const httplib::Request&, httplib::Response& response) {
    if (response.body.empty()) {
      const char* const message = response.status == 413   ? "the body is too large"
                                  : response.status == 414 ? "the path is too long"
                                                           : "this is no request that can be understood";
      send(error_reply(response.status, message), response);
    }
  });
  server.set_exception_handler([](const httplib::Request&, httplib::Response& response, const auto&...) {
    send(error_reply(500, "the request failed"), response);
  });

  impl_->port = options.port;
  const bool is_bound = options.port == 0 ? (impl_->port = server.bind_to_any_port(options.host)) > 0
                                          : server.bind_to_port(options.host, options.port);
  if (!is_bound) {
    throw common::InputError(
        common::format("can't listen on %s:%d: is the port in use, and the address this machine's?",
                       options.host.c_str(), options.port));
  }
  constexpr int kBacklog = 1024;  // the library's is 5: a burst of connections would wait for seconds
  ::listen(impl_->listening_socket, kBacklog);
  impl_->thread = std::thread([&server] { server.listen_after_bind(); });
}

HttpServer::~HttpServer() {
  while (!impl_->server.is_running()) {  // or stop() would come too early
    std::this_thread::yield();
  }
  impl_->server.stop();
  impl_->thread.join();
}

int HttpServer::port() const { return impl_->port; }

#endif

}  // namespace
