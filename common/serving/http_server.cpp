#include "common/serving/http_server.h"

#include <charconv>

#include "common/base/check.h"
#include "common/base/text.h"

#ifdef COURSE_HTTPLIB
#include <httplib.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>
#endif

namespace common {

HttpOptions parse_address(const std::string& address) {
  HttpOptions options;
  const std::size_t colon = address.rfind(':');
  const std::string port = colon == std::string::npos ? "" : address.substr(colon + 1);
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), options.port);
  if (error != std::errc() || end != port.data() + port.size() || options.port < 0 || options.port > 65535) {
    throw InputError("--http takes an address like 127.0.0.1:8080, not " + quote(address));
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
  throw InputError("this program was built without HTTP: install " + missing_http_package() +
                   ", then configure and build again");
}
HttpServer::~HttpServer() = default;
int HttpServer::port() const { return 0; }

#else

namespace {

using SteadyTime = std::chrono::steady_clock::time_point;

struct Connection {
  int socket = -1;
  std::string peer;         // the address of its other end
  bool is_reading = false;  // its next request
  SteadyTime since;
};

// The connections that are open. The library keeps their sockets to itself, and without them it would go unnoticed that
// a client has hung up before its reply begins. It bounds the time between two reads alone: a client that sends a byte
// now and then would keep its thread for ever, so those that take too long for a whole request are cut off here.
class Connections {
 public:
  explicit Connections(std::chrono::milliseconds max_request_time)
      : max_request_time_(max_request_time), thread_([this] { watch(); }) {}
  Connections(const Connections&) = delete;
  Connections& operator=(const Connections&) = delete;
  ~Connections() {
    {
      const std::lock_guard lock(mutex_);
      is_ending_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }

  // The one that has just been accepted on this port: the only socket there that is not known yet or, where another has
  // been closed and not removed, the one with another peer. socket -1: there is none.
  std::shared_ptr<Connection> add(int port) {
    constexpr int kMaxSockets = 1 << 14;
    const std::lock_guard lock(mutex_);
    auto result = std::make_shared<Connection>();
    for (const bool is_known : {false, true}) {
      for (int socket = 3; socket < kMaxSockets; ++socket) {
        const auto known = open_.find(socket);
        if ((known != open_.end()) != is_known) {
          continue;
        }
        const std::string peer = peer_of(socket, port);
        if (!peer.empty() && (!is_known || known->second->peer != peer)) {
          *result = {socket, peer, false, {}};
          open_[socket] = result;
          return result;
        }
      }
    }
    return result;
  }
  void remove(const Connection& connection) {
    const std::lock_guard lock(mutex_);
    const auto known = open_.find(connection.socket);
    if (known != open_.end() && known->second.get() == &connection) {
      open_.erase(known);
    }
  }

  void set_reading(Connection& connection, bool is_reading) {
    const std::lock_guard lock(mutex_);
    connection.is_reading = is_reading;
    connection.since = std::chrono::steady_clock::now();
  }

 private:
  // The address of a socket's other end; empty unless it was accepted on this port. port 0: on any.
  static std::string peer_of(int socket, int port) {
    sockaddr_storage own = {};
    sockaddr_storage peer = {};
    socklen_t own_size = sizeof(own);
    socklen_t peer_size = sizeof(peer);
    // The sockets' interface is like that.
    if (getpeername(socket, reinterpret_cast<sockaddr*>(&peer), &peer_size) != 0 ||
        getsockname(socket, reinterpret_cast<sockaddr*>(&own), &own_size) != 0) {
      return "";
    }
    const in_port_t own_port = own.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(own).sin6_port
                                                         : reinterpret_cast<const sockaddr_in&>(own).sin_port;
    return port == 0 || ntohs(own_port) == port ? std::string(reinterpret_cast<const char*>(&peer), peer_size) : "";
  }

  void watch() {
    constexpr int kLooks = 8;  // in the time that a request may take
    std::unique_lock lock(mutex_);
    while (!wake_.wait_for(lock, max_request_time_ / kLooks, [&] { return is_ending_; })) {
      const SteadyTime latest = std::chrono::steady_clock::now() - max_request_time_;
      for (const auto& [socket, connection] : open_) {
        if (connection->is_reading && connection->since < latest && peer_of(socket, 0) == connection->peer) {
          ::shutdown(socket, SHUT_RDWR);
        }
      }
    }
  }

  std::chrono::milliseconds max_request_time_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::map<int, std::shared_ptr<Connection>> open_;  // by socket
  bool is_ending_ = false;
  std::thread thread_;
};

// Of this thread.
thread_local Connection* served = nullptr;

// The threads of the connections, made as they are needed.
class ConnectionThreads : public httplib::TaskQueue {
 public:
  ConnectionThreads(int max_threads, Connections& connections, int port)
      : max_threads_(static_cast<std::size_t>(max_threads)), connections_(connections), port_(port) {}

  // void or bool, whether it was taken: versions differ.
  using Enqueued = decltype(std::declval<httplib::TaskQueue&>().enqueue(std::declval<std::function<void()>>()));
  Enqueued enqueue(std::function<void()> task) override {
    std::shared_ptr<Connection> connection = connections_.add(port_);
    {
      const std::lock_guard lock(mutex_);
      tasks_.emplace_back(std::move(task), std::move(connection));
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
      const auto [task, connection] = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      served = connection.get();
      connections_.set_reading(*connection, true);
      task();
      served = nullptr;
      connections_.remove(*connection);
      lock.lock();
    }
  }

  std::size_t max_threads_;
  Connections& connections_;
  int port_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::pair<std::function<void()>, std::shared_ptr<Connection>>> tasks_;
  std::vector<std::thread> threads_;
  std::size_t num_idle_ = 0;
  bool is_ending_ = false;
};

bool has_hung_up(int socket) {
  pollfd state = {socket, POLLIN, 0};
  if (socket < 0 || poll(&state, 1, 0) <= 0) {
    return false;
  }
  char byte = 0;
  return recv(socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0 || (state.revents & (POLLERR | POLLNVAL)) != 0;
}

// Whether only this machine can reach the address that the socket is bound to.
bool is_on_loopback(int socket) {
  constexpr in_addr_t kNetwork = 127;  // 127.0.0.0/8
  sockaddr_storage own = {};
  socklen_t size = sizeof(own);
  if (getsockname(socket, reinterpret_cast<sockaddr*>(&own), &size) != 0) {
    return false;
  }
  return own.ss_family == AF_INET6 ? IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(own).sin6_addr)
                                   : ntohl(reinterpret_cast<const sockaddr_in&>(own).sin_addr.s_addr) >> 24 == kNetwork;
}

ApiRequest api_request(const httplib::Request& request, bool is_on_loopback) {
  return {request.method,
          request.path,
          request.body,
          request.get_header_value("Authorization"),
          request.get_header_value("Content-Type"),
          request.get_header_value("Origin"),
          request.get_header_value("Host"),
          is_on_loopback};
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
    bool goes_on = false;
    try {
      goes_on = stream->read(text);
    } catch (const std::exception&) {  // the library would let it end the program
      return false;
    }
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
  explicit Impl(std::chrono::milliseconds max_request_time) : connections(max_request_time) {}

  Connections connections;
  httplib::Server server;
  int listening_socket = -1;
  int port = 0;
  bool is_on_loopback = false;
  std::thread thread;
};

std::string missing_http_package() { return ""; }

HttpServer::HttpServer(Api& api, const HttpOptions& options)
    : impl_(std::make_unique<Impl>(kWholeRequest * options.timeout)) {
  constexpr int kMaxPathLength = 256;            // longer ones would be matched by a recursive regular expression
  constexpr std::size_t kMaxKeptAlive = 10'000;  // requests of one connection
  httplib::Server& server = impl_->server;
  server.new_task_queue = [threads = options.max_connections, impl = impl_.get()] {
    return new ConnectionThreads(threads, impl->connections, impl->port);
  };
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
  const auto answer = [&api, impl = impl_.get()](const httplib::Request& request, httplib::Response& response) {
    impl->connections.set_reading(*served, false);
    send(api.handle(api_request(request, impl->is_on_loopback), [] { return has_hung_up(served->socket); }), response);
  };
  // Called when a reply has been sent.
  server.set_logger([&connections = impl_->connections](const httplib::Request&, const httplib::Response&) {
    connections.set_reading(*served, true);
  });
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
    throw InputError(format("can't listen on %s:%d: is the port in use, and the address this machine's?",
                            options.host.c_str(), options.port));
  }
  impl_->is_on_loopback = is_on_loopback(impl_->listening_socket);
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

}  // namespace common
