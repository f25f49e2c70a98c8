#include "common/serving/http_server.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <condition_variable>
#include <cstddef>
#include <ctime>
#include <exception>
#include <iterator>
#include <list>
#include <mutex>
#include <new>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/check.h"
#include "common/base/platform.h"
#include "common/base/text.h"
#include "common/serving/http_request.h"

namespace common {
namespace {

using SteadyClock = std::chrono::steady_clock;
using SteadyTime = SteadyClock::time_point;

constexpr std::chrono::milliseconds kIdle{20};  // between two looks at connections that say nothing

// Owns a descriptor, and closes it.
class Socket {
 public:
  explicit Socket(int descriptor = -1) : descriptor_(descriptor) {}
  Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~Socket() {
    if (descriptor_ >= 0) {
      ::close(descriptor_);
    }
  }
  int get() const { return descriptor_; }

 private:
  int descriptor_;
};

// Makes calls on the descriptor return at once, and keeps child processes from inheriting it.
void set_flags(int descriptor) {
  fcntl(descriptor, F_SETFL, fcntl(descriptor, F_GETFL) | O_NONBLOCK);
  fcntl(descriptor, F_SETFD, FD_CLOEXEC);
}

bool would_wait() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

// The address of this end of the socket.
sockaddr_storage own_address(int socket) {
  sockaddr_storage own = {};
  socklen_t size = sizeof(own);
  getsockname(socket, reinterpret_cast<sockaddr*>(&own), &size);  // the sockets' interface is like that
  return own;
}

int port_of(int socket) {
  const sockaddr_storage own = own_address(socket);
  return ntohs(own.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(own).sin6_port
                                         : reinterpret_cast<const sockaddr_in&>(own).sin_port);
}

// Whether the connection was made to an address that only this machine reaches: ::1, or one of 127.0.0.0/8.
bool is_on_loopback(int socket) {
  constexpr unsigned char kNetwork = 127;
  const sockaddr_storage own = own_address(socket);
  if (own.ss_family == AF_INET) {
    return ntohl(reinterpret_cast<const sockaddr_in&>(own).sin_addr.s_addr) >> 24 == kNetwork;
  }
  const in6_addr& address = reinterpret_cast<const sockaddr_in6&>(own).sin6_addr;
  return IN6_IS_ADDR_LOOPBACK(&address) || (IN6_IS_ADDR_V4MAPPED(&address) && address.s6_addr[12] == kNetwork);
}

Socket listen_on(const HttpOptions& options) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  Socket result;
  if (getaddrinfo(options.host.c_str(), std::to_string(options.port).c_str(), &hints, &found) == 0) {
    for (const addrinfo* entry = found; entry != nullptr && result.get() < 0; entry = entry->ai_next) {
      Socket socket(::socket(entry->ai_family, entry->ai_socktype, entry->ai_protocol));
      const int yes = 1;
      setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
      if (bind(socket.get(), entry->ai_addr, entry->ai_addrlen) == 0 && listen(socket.get(), SOMAXCONN) == 0) {
        result = std::move(socket);
      }
    }
    freeaddrinfo(found);
  }
  if (result.get() < 0) {
    throw InputError(format("can't listen on %s:%d: is the port in use, and the address this machine's?",
                            options.host.c_str(), options.port));
  }
  set_flags(result.get());
  return result;
}

// Has no meaning to most clients, which must skip it; a client that waits for it begins to send the body.
constexpr std::string_view kContinue = "HTTP/1.1 100 Continue\r\n\r\n";

// The reply when there is no memory to make one.
constexpr std::string_view kNoMemory =
    "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    "Content-Length: 84\r\n\r\n"
    R"({"error":{"message":"out of memory","type":"server_error","param":null,"code":null}})";
static_assert(kNoMemory.size() - (kNoMemory.find("\r\n\r\n") + 4) == 84);

// Bytes of a connection that are not in the account: a head, or a small body.
constexpr std::size_t kUncounted = 1 << 15;

constexpr const char* kNotNow = "other requests have the memory that all may take (--request-memory)";

struct Connection {
  Connection(Socket accepted, std::size_t max_body_bytes, std::shared_ptr<MemoryAccount> account)
      : socket(std::move(accepted)),
        is_on_loopback(common::is_on_loopback(socket.get())),
        reader(max_body_bytes),
        memory(std::move(account)) {}

  Socket socket;
  bool is_on_loopback;
  std::string received;  // bytes that the reader has not used yet
  HttpRequestReader reader;
  MemoryAccount::Share memory;            // for the body, until its reply has been sent
  std::optional<ApiReply> refusal;        // in place of the API's reply
  bool has_no_memory = false;             // to make a reply
  bool has_begun_reply = false;           // a part of it has been sent
  bool waits = false;                     // for memory
  bool never_fits = false;                // the body, in what one request may take
  bool closes = false;                    // after the reply
  bool has_ended = false;                 // the client sends no more
  bool is_ending = false;                 // the last reply is sent: what comes is dropped until the client closes too
  bool has_news = true;                   // since the reader looked last
  SteadyTime since = SteadyClock::now();  // the connection's beginning, or the end of its last reply
  SteadyTime last_read = since;
  SteadyTime body_since;        // when memory was granted for the body
  std::size_t body_before = 0;  // bytes of the body that had come by then
};

// Reads all bytes that have arrived. False: the connection is broken.
bool receive(Connection& connection) {
  std::array<char, 1 << 14> bytes;  // NOLINT(cppcoreguidelines-pro-type-member-init): recv() fills it
  const ssize_t count = recv(connection.socket.get(), bytes.data(), bytes.size(), 0);
  if (count > 0) {
    connection.last_read = SteadyClock::now();
    connection.received.append(bytes.data(), static_cast<std::size_t>(count));
  }
  connection.has_ended = connection.has_ended || count == 0;
  connection.has_news = true;
  return count >= 0 || would_wait();
}

// For how long a client may read nothing. It becomes shorter while replies are being sent.
class ReplyTimeout {
 public:
  explicit ReplyTimeout(std::chrono::milliseconds usual) : limit_(usual) {}
  std::chrono::milliseconds limit() const { return limit_; }
  void shorten() { limit_ = std::min(limit_.load(), kLastWait); }

 private:
  static constexpr std::chrono::milliseconds kLastWait{1000};
  std::atomic<std::chrono::milliseconds> limit_;
};

// False: the connection is broken, or the client has read nothing for too long.
bool send_all(int socket, std::string_view bytes, const ReplyTimeout& reply_timeout) {
  constexpr std::chrono::milliseconds kTick{100};
  auto last_sent = SteadyClock::now();
  while (!bytes.empty()) {
    const ssize_t sent = ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    pollfd state = {socket, POLLOUT, 0};
    if (sent > 0) {
      bytes.remove_prefix(static_cast<std::size_t>(sent));
      last_sent = SteadyClock::now();
    } else if (!would_wait() || SteadyClock::now() - last_sent >= reply_timeout.limit()) {
      return false;
    } else {
      poll(&state, 1, static_cast<int>(std::min(kTick, reply_timeout.limit()).count()));
    }
  }
  return true;
}

// Whether the client has gone, asked while a reply is made. A client that has closed only its sending half still reads.
// The system reports a client that has closed everything only when bytes are sent: `probe`, which clients skip.
bool has_hung_up(Connection& connection, std::string_view probe, const ReplyTimeout& reply_timeout) {
  constexpr std::size_t kMaxAhead = 1 << 16;  // bytes of requests that follow this one
  pollfd state = {connection.socket.get(), POLLIN, 0};
  if (poll(&state, 1, 0) <= 0) {
    return false;
  }
  if ((state.revents & (POLLERR | POLLHUP | POLLNVAL)) != 0) {
    return true;
  }
  if (connection.has_ended || connection.received.size() > kMaxAhead) {
    return false;
  }
  return !receive(connection) || (connection.has_ended && !send_all(connection.socket.get(), probe, reply_timeout));
}

ApiRequest api_request(const Connection& connection, std::string body = "") {
  const HttpHead& head = connection.reader.head();
  return {head.method,
          head.path,
          std::move(body),
          head.field("authorization"),
          head.field("content-type"),
          head.field("origin"),
          head.authority.empty() ? head.field("host") : head.authority,
          head.field("access-control-request-headers"),
          connection.is_on_loopback,
          head.field("x-request-id")};
}

// "Sun, 06 Nov 1994 08:49:37 GMT", in English whatever the locale.
std::string http_date() {
  constexpr std::array kDays = {"Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"};
  constexpr std::array kMonths = {"Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"};
  constexpr int kFirstYear = 1900;
  const std::time_t now = std::time(nullptr);
  std::tm utc = {};
  ::gmtime_r(&now, &utc);
  return format("%s, %02d %s %04d %02d:%02d:%02d GMT", kDays[static_cast<std::size_t>(utc.tm_wday)], utc.tm_mday,
                kMonths[static_cast<std::size_t>(utc.tm_mon)], kFirstYear + utc.tm_year, utc.tm_hour, utc.tm_min,
                utc.tm_sec);
}

const char* reason_of(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 403:
      return "Forbidden";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 408:
      return "Request Timeout";
    case 413:
      return "Content Too Large";
    case 415:
      return "Unsupported Media Type";
    case 417:
      return "Expectation Failed";
    case 429:
      return "Too Many Requests";
    case 431:
      return "Request Header Fields Too Large";
    case 501:
      return "Not Implemented";
    case 503:
      return "Service Unavailable";
    case 505:
      return "HTTP Version Not Supported";
    default:
      return status < 500 ? "Client Error" : "Server Error";
  }
}

std::string chunk_of(std::string_view text) { return format("%zx\r\n", text.size()).append(text).append("\r\n"); }

}  // namespace

HttpOptions parse_address(const std::string& address) {
  HttpOptions options;
  const std::size_t colon = address.rfind(':');
  const std::string port = colon == std::string::npos ? "" : address.substr(colon + 1);
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), options.port);
  if (error != std::errc() || end != port.data() + port.size() || options.port < 0 || options.port > 65535) {
    throw InputError("an address is like 127.0.0.1:8080, not " + quote(address));
  }
  std::string host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  options.host = host.empty() ? options.host : host;
  return options;
}

// One thread reads all requests: a connection that is idle, or slow to send, costs a descriptor and the bytes that it
// has sent so far. A whole request gets a thread of its own until its reply is sent.
//
//   thread     accept, read ──► requests ──► workers: Api::handle, send the reply
//                  ▲                              │
//                  └──────── returned ◄───────────┘
struct HttpServer::Impl {
  explicit Impl(const HttpOptions& given);
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  using Connections = std::list<Connection>;  // moving an element between lists allocates nothing, so it can't fail

  void run();
  void wait_for_news();
  bool may_read(Connection& connection);
  void drop_slowest_body();
  void accept_all();
  bool make_room();
  void advance(Connections::iterator connection);
  void refuse(Connections::iterator connection, int status, const char* message) noexcept;
  void say_no_memory(Connection& connection) const noexcept;
  void hand_over(Connections::iterator connection);
  void drop_late_ones();
  bool is_over();
  void end_waiting();
  void wake() const;
  void work(std::list<std::thread>::iterator self);
  void join_ended();
  static void join(std::list<std::thread>& threads);
  void release_memory();
  bool answer(Connection& connection) const;
  bool send_stream(Connection& connection, ReplyBody& body, bool is_in_chunks) const;

  std::atomic<Api*> api = nullptr;  // null: starting
  HttpOptions options;
  Socket listener;
  int port = 0;
  bool is_on_loopback = false;
  std::size_t max_open = 0;
  std::array<Socket, 2> wake_pipe;
  std::atomic<bool> is_near_end = false;
  std::atomic<bool> is_ending = false;
  ReplyTimeout reply_timeout;

  // Used by the thread that reads.
  std::vector<pollfd> polled;
  Connections waiting;           // for their next request, or for the rest of one
  std::size_t num_incoming = 0;  // bytes of the account for bodies that come in
  bool is_short = false;         // a body waits for memory
  bool is_full = false;          // the maximum of connections is open, and all of them are served
  SteadyTime end;                // when the last replies are cut off, once the server is ending
  bool has_unreleased = false;   // memory of requests
  SteadyTime last_busy;          // when there were some

  std::mutex mutex;
  std::condition_variable has_request;
  Connections requests;  // with a whole request, or a refusal
  Connections answered;  // each by a worker
  Connections returned;
  std::list<std::thread> workers;
  std::list<std::thread> ended_workers;  // to be joined
  std::size_t num_idle = 0;              // workers
  bool is_done = false;                  // no request will come

  std::thread thread;
};

HttpServer::Impl::Impl(const HttpOptions& given)
    : options(given),
      listener(listen_on(given)),
      port(port_of(listener.get())),
      is_on_loopback(common::is_on_loopback(listener.get())),
      reply_timeout(given.timeout) {
  if (options.memory == nullptr) {
    options.memory = MemoryAccount::of_this_machine();
  }
  // Three times as many connections may wait as are served, if the system allows the program that number of files.
  constexpr rlim_t kOtherFiles = 64;
  rlimit files = {};
  getrlimit(RLIMIT_NOFILE, &files);
  max_open = std::min(4 * static_cast<std::size_t>(options.max_connections),
                      static_cast<std::size_t>(std::max(files.rlim_cur, 2 * kOtherFiles) - kOtherFiles));
  std::array<int, 2> ends = {};
  if (pipe(ends.data()) != 0) {
    throw InputError("the system allows this program no more files");
  }
  for (std::size_t i = 0; i < ends.size(); ++i) {
    wake_pipe.at(i) = Socket(ends.at(i));
    set_flags(ends.at(i));
  }
  thread = std::thread([this] { run(); });
}

HttpServer::Impl::~Impl() {
  reply_timeout.shorten();
  is_ending = true;
  wake();
  thread.join();
  {
    const std::lock_guard lock(mutex);
    is_done = true;
  }
  has_request.notify_all();
  join(workers);
  join(ended_workers);
}

void HttpServer::Impl::join(std::list<std::thread>& threads) {
  for (std::thread& ending : threads) {
    ending.join();
  }
  threads.clear();
}

void HttpServer::Impl::wake() const {
  const char byte = 0;
  [[maybe_unused]] const ssize_t written = write(wake_pipe[1].get(), &byte, 1);  // a full pipe wakes it too
}

void HttpServer::Impl::run() {
  while (!is_over()) {
    try {
      wait_for_news();
    } catch (const std::bad_alloc&) {  // no list of sockets to wait for, or no room for another connection
      std::this_thread::sleep_for(kIdle);
    }
    for (auto connection = waiting.begin(); connection != waiting.end();) {
      const auto next = std::next(connection);
      if (connection->has_news) {
        advance(connection);
      }
      connection = next;
    }
    drop_late_ones();
    join_ended();
    release_memory();
  }
}

// Freed memory stays with malloc. It goes back to the system once a second has passed without requests.
void HttpServer::Impl::release_memory() {
  const SteadyTime now = SteadyClock::now();
  bool is_busy = options.memory->used() > 0;
  {
    const std::lock_guard lock(mutex);
    is_busy = is_busy || !requests.empty() || !answered.empty();
  }
  if (is_busy) {
    has_unreleased = true;
    last_busy = now;
  } else if (has_unreleased && now - last_busy > std::chrono::seconds(1)) {
    has_unreleased = false;
    release_freed_memory();
  }
}

// Joins the workers that have ended, outside the lock that they end with.
void HttpServer::Impl::join_ended() {
  std::list<std::thread> ended;
  {
    const std::lock_guard lock(mutex);
    ended.swap(ended_workers);
  }
  join(ended);
}

// Collects the connections that the workers have answered. True: the server ends, and the last reply is sent. Clients
// that do not read their replies have one more time-out.
bool HttpServer::Impl::is_over() {
  {
    const std::lock_guard lock(mutex);
    waiting.splice(waiting.end(), returned);
  }
  if (!is_ending) {
    return false;
  }
  if (listener.get() >= 0) {
    end = SteadyClock::now() + options.timeout;
    try {
      accept_all();
    } catch (const std::bad_alloc&) {  // the others are closed with the listener
    }
    listener = Socket();
    return false;  // what has come is read first
  }
  end_waiting();
  const std::lock_guard lock(mutex);
  if (SteadyClock::now() > end) {
    for (const Connection& connection : answered) {
      ::shutdown(connection.socket.get(), SHUT_RDWR);
    }
  }
  return waiting.empty() && requests.empty() && answered.empty() && returned.empty();
}

// Refuses requests that have begun, and closes connections that say nothing. A new one has a moment to say something,
// and one whose last reply is sent a second to be closed by its client: with something unread it would be reset.
void HttpServer::Impl::end_waiting() {
  constexpr std::chrono::milliseconds kFirstBytes{100};
  for (auto connection = waiting.begin(); connection != waiting.end();) {
    const auto next = std::next(connection);
    const bool has_begun = connection->reader.has_begun() || !connection->received.empty();
    if (!connection->is_ending && has_begun) {
      refuse(connection, 503, "the server is ending");
    } else if (SteadyClock::now() - connection->since > (connection->is_ending ? reply_timeout.limit() : kFirstBytes)) {
      waiting.erase(connection);
    }
    connection = next;
  }
}

void HttpServer::Impl::wait_for_news() {
  bool has_news = false;
  num_incoming = 0;
  for (const Connection& connection : waiting) {
    has_news = has_news || connection.has_news;
    num_incoming += connection.memory.bytes();
  }
  polled.clear();
  polled.reserve(waiting.size() + 2);
  polled.push_back({wake_pipe[0].get(), POLLIN, 0});
  polled.push_back({std::exchange(is_full, false) ? -1 : listener.get(), POLLIN, 0});
  for (Connection& connection : waiting) {
    polled.push_back({may_read(connection) ? connection.socket.get() : -1, POLLIN, 0});
  }
  poll(polled.data(), static_cast<nfds_t>(polled.size()), has_news ? 0 : static_cast<int>(kIdle.count()));
  std::array<char, 256> bytes = {};
  while (read(wake_pipe[0].get(), bytes.data(), bytes.size()) > 0) {
  }
  auto state = polled.begin() + 2;
  for (auto connection = waiting.begin(); connection != waiting.end(); ++state) {
    bool is_broken = false;
    try {
      is_broken = state->revents != 0 && !receive(*connection);
    } catch (const std::bad_alloc&) {
      connection->has_no_memory = connection->has_news = true;
    }
    connection = is_broken ? waiting.erase(connection) : std::next(connection);
  }
  if (std::exchange(is_short, false)) {
    drop_slowest_body();
  }
  if (polled[1].revents != 0) {
    accept_all();
  }
}

// Whether the account has room for the whole body, asked before more than a small part of it is read: bodies that come
// in have half of it, because what has come needs the rest. If there is none, the client waits, and the slowest body
// makes room.
bool HttpServer::Impl::may_read(Connection& connection) {
  const std::size_t held = connection.received.size() + connection.reader.body().size();
  if (connection.is_ending || held < kUncounted || connection.memory.bytes() > 0) {
    return true;
  }
  const std::size_t size = connection.reader.max_size();
  const bool has_room = num_incoming == 0 || num_incoming + size <= options.memory->in_all() / 2;
  const MemoryAccount::Answer answer = has_room ? connection.memory.resize(size) : MemoryAccount::Answer::kNotNow;
  connection.never_fits = connection.has_news = answer == MemoryAccount::Answer::kNeverFits;
  connection.waits = answer == MemoryAccount::Answer::kNotNow;
  connection.last_read = SteadyClock::now();
  if (answer == MemoryAccount::Answer::kGranted) {
    connection.body_since = connection.last_read;
    connection.body_before = connection.reader.body().size();
    num_incoming += size;
  }
  is_short = is_short || connection.waits;
  return answer == MemoryAccount::Answer::kGranted;
}

// While others wait, a body has to come at a rate at which the largest one would take eight seconds.
void HttpServer::Impl::drop_slowest_body() {
  constexpr double kSeconds = 8.0;
  constexpr double kGrace = 1.0;
  double slowest = static_cast<double>(options.max_body_bytes) / kSeconds;
  auto dropped = waiting.end();
  for (auto connection = waiting.begin(); connection != waiting.end(); ++connection) {
    const double seconds = std::chrono::duration<double>(SteadyClock::now() - connection->body_since).count();
    const double rate = static_cast<double>(connection->reader.body().size() - connection->body_before) / seconds;
    if (connection->memory.bytes() > 0 && seconds > kGrace && rate < slowest) {
      slowest = rate;
      dropped = connection;
    }
  }
  if (dropped != waiting.end()) {
    refuse(dropped, 408, "the body came too slowly while others waited for memory");
  }
}

void HttpServer::Impl::accept_all() {
  while (true) {
    std::size_t num_open = waiting.size();
    {
      const std::lock_guard lock(mutex);
      num_open += requests.size() + answered.size() + returned.size();
    }
    is_full = num_open >= max_open && !make_room();
    if (is_full) {
      return;
    }
    Socket socket(accept(listener.get(), nullptr, nullptr));
    if (socket.get() < 0) {
      is_full = (errno == EMFILE || errno == ENFILE) && !make_room();
      return;
    }
    set_flags(socket.get());
    const int yes = 1;
    setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
    // What the system keeps for a client that does not read; otherwise megabytes for each client.
    const int send_buffer = 1 << 17;
    setsockopt(socket.get(), SOL_SOCKET, SO_SNDBUF, &send_buffer, sizeof(send_buffer));
    waiting.emplace_back(std::move(socket), options.max_body_bytes, options.memory);
  }
}

// Closes the connection that has waited longest, so that idle ones keep no client out. False: there is none.
bool HttpServer::Impl::make_room() {
  const auto longest = std::min_element(waiting.begin(), waiting.end(),
                                        [](const auto& left, const auto& right) { return left.since < right.since; });
  if (longest == waiting.end()) {
    return false;
  }
  waiting.erase(longest);
  return true;
}

// Continues to read the request.
void HttpServer::Impl::advance(Connections::iterator connection) {
  HttpRequestReader& reader = connection->reader;
  connection->has_news = false;
  if (connection->is_ending) {
    connection->received.clear();
  } else if (connection->has_no_memory) {
    say_no_memory(*connection);
  } else if (connection->never_fits) {
    refuse(connection, 413, "the body is larger than the memory that one request may take (half of --request-memory)");
    return;
  } else {
    try {
      if (!reader.has_head() && reader.read_head(connection->received)) {
        Api* const answering = api;
        connection->refusal = answering != nullptr
                                  ? answering->refusal(api_request(*connection))  // no body is read yet
                                  : starting_reply(reader.head().path);
        if (!connection->refusal.has_value() && reader.head().has("expect") && connection->received.empty()) {
          send_all(connection->socket.get(), kContinue, ReplyTimeout(std::chrono::milliseconds(0)));
        }
      }
      const bool is_whole = reader.has_head() && reader.read_body(connection->received);
      if (is_whole || connection->refusal.has_value()) {
        connection->closes = !is_whole;  // the rest of the body is no request
        hand_over(connection);
        return;
      }
    } catch (const HttpError& error) {
      refuse(connection, error.status(), error.what());
      return;
    } catch (const std::exception&) {
      say_no_memory(*connection);
    }
  }
  if (connection->has_ended) {
    waiting.erase(connection);
  }
}

// Replies without memory, as far as the socket takes it at once. What still comes is dropped.
void HttpServer::Impl::say_no_memory(Connection& connection) const noexcept {
  [[maybe_unused]] const ssize_t sent =
      ::send(connection.socket.get(), kNoMemory.data(), kNoMemory.size(), MSG_NOSIGNAL);
  ::shutdown(connection.socket.get(), SHUT_WR);
  connection.is_ending = true;
  connection.received = {};
  connection.reader = HttpRequestReader(options.max_body_bytes);
  connection.refusal.reset();
  connection.memory.resize(0);
  connection.since = connection.last_read = SteadyClock::now();
}

void HttpServer::Impl::refuse(Connections::iterator connection, int status, const char* message) noexcept {
  try {
    Api* const answering = api;
    ApiReply reply = error_reply(status, message);
    connection->refusal =
        answering != nullptr ? answering->with_headers(api_request(*connection), std::move(reply)) : std::move(reply);
    connection->closes = true;
    hand_over(connection);
  } catch (const std::exception&) {
    say_no_memory(*connection);
  }
}

void HttpServer::Impl::hand_over(Connections::iterator connection) {
  {
    const std::lock_guard lock(mutex);
    requests.splice(requests.end(), waiting, connection);
    if (num_idle < requests.size() && workers.size() < static_cast<std::size_t>(options.max_connections)) {
      try {
        std::list<std::thread> added(1);
        added.front() = std::thread([this, self = added.begin()] { work(self); });
        workers.splice(workers.end(), added);
      } catch (const std::exception&) {  // the system has no more threads: an existing worker gets it
        if (workers.empty()) {
          requests.clear();
        }
      }
    }
  }
  has_request.notify_one();
}

// A client that sends a byte now and then would keep its connection for ever.
void HttpServer::Impl::drop_late_ones() {
  const SteadyTime now = SteadyClock::now();
  for (auto connection = waiting.begin(); connection != waiting.end();) {
    const auto next = std::next(connection);
    if (now - connection->last_read > options.timeout || now - connection->since > kWholeRequest * options.timeout) {
      if (connection->is_ending || !connection->reader.has_begun()) {
        waiting.erase(connection);
      } else {
        refuse(connection, connection->waits ? 429 : 408,
               connection->waits ? kNotNow : "the request took too long to come");
      }
    }
    connection = next;
  }
}

// A worker ends when there is nothing to do and enough others are idle: after a burst, hundreds would keep their
// stacks.
void HttpServer::Impl::work(std::list<std::thread>::iterator self) {
  constexpr std::size_t kMaxIdle = 8;
  std::unique_lock lock(mutex);
  while (true) {
    if (requests.empty() && num_idle >= kMaxIdle && !is_done) {
      ended_workers.splice(ended_workers.end(), workers, self);
      return;
    }
    num_idle += 1;
    has_request.wait(lock, [&] { return !requests.empty() || is_done; });
    num_idle -= 1;
    if (requests.empty()) {
      return;
    }
    answered.splice(answered.end(), requests, requests.begin());
    const auto connection = std::prev(answered.end());
    lock.unlock();
    bool is_whole = false;
    try {
      is_whole = answer(*connection);
    } catch (const std::bad_alloc&) {
      if (!connection->has_begun_reply) {
        say_no_memory(*connection);
        is_whole = true;
      }
    } catch (const std::exception&) {  // this reply can't be made or sent; the connection ends with it
    }
    lock.lock();
    if (is_whole) {
      returned.splice(returned.end(), answered, connection);
    } else {
      answered.erase(connection);
    }
    wake();
  }
}

// False: the connection is broken.
bool HttpServer::Impl::answer(Connection& connection) const {
  const HttpHead& head = connection.reader.head();
  const SteadyTime begin = SteadyClock::now();
  const auto is_gone = [&] { return has_hung_up(connection, head.is_version_1_0 ? "" : kContinue, reply_timeout); };
  ApiReply reply = connection.refusal.has_value()
                       ? std::move(*connection.refusal)
                       : api.load()->handle(api_request(connection, connection.reader.take_body()), is_gone);
  const bool is_in_chunks = reply.stream != nullptr && !head.is_version_1_0;
  connection.closes =
      connection.closes || is_near_end || is_ending || !head.keeps_alive || (reply.stream != nullptr && !is_in_chunks);
  std::string text = format("HTTP/1.1 %d %s\r\nContent-Type: ", reply.status, reason_of(reply.status)) +
                     reply.content_type + "\r\nDate: " + http_date() +
                     "\r\nConnection: " + (connection.closes ? "close" : "keep-alive") + "\r\n";
  std::string id;
  for (const auto& [name, value] : reply.headers) {
    id = name == kRequestId ? value : id;
    text.append(name).append(": ").append(value).append("\r\n");
  }
  if (is_in_chunks) {
    text += "Transfer-Encoding: chunked\r\n";
  } else if (reply.stream == nullptr) {
    text += format("Content-Length: %zu\r\n", reply.body_text().size());
  }
  text += "\r\n";
  constexpr std::size_t kJoined = 1 << 12;  // a small reply goes out at once; a large one is not copied
  std::string_view body = head.method == "HEAD" ? std::string_view() : reply.body_text();
  if (body.size() <= kJoined) {
    text += std::exchange(body, {});
  }
  connection.has_begun_reply = true;
  const bool is_sent =
      send_all(connection.socket.get(), text, reply_timeout) &&
      send_all(connection.socket.get(), body, reply_timeout) &&
      (reply.stream == nullptr || head.method == "HEAD" || send_stream(connection, *reply.stream, is_in_chunks));
  if (options.on_answered) {
    options.on_answered({.method = head.method,
                         .path = head.path,
                         .status = reply.status,
                         .figures = reply.stream != nullptr ? reply.stream->figures() : reply.figures,
                         .seconds = std::chrono::duration<double>(SteadyClock::now() - begin).count(),
                         .is_read = is_sent,
                         .id = id,
                         .problem = reply.problem});
  }
  if (connection.closes) {
    // Closed with something unread, the connection would be reset, and the client might lose the reply.
    ::shutdown(connection.socket.get(), SHUT_WR);
    connection.is_ending = true;
  }
  connection.reader = HttpRequestReader(options.max_body_bytes);
  connection.refusal.reset();
  connection.memory.resize(0);
  if (connection.received.empty()) {
    connection.received = {};  // with what it had room for
  }
  connection.has_begun_reply = false;
  connection.has_news = true;
  connection.since = connection.last_read = SteadyClock::now();
  return is_sent;
}

// False: the connection is broken.
bool HttpServer::Impl::send_stream(Connection& connection, ReplyBody& body, bool is_in_chunks) const {
  const auto framed = [&](const std::string& text) { return is_in_chunks ? chunk_of(text) : text; };
  bool goes_on = true;
  while (goes_on) {
    std::string text;
    goes_on = body.read(text);
    const bool is_lost = text.empty() ? has_hung_up(connection, framed(":\n\n"), reply_timeout)  // a comment
                                      : !send_all(connection.socket.get(), framed(text), reply_timeout);
    if (is_lost) {
      return false;
    }
  }
  return !is_in_chunks || send_all(connection.socket.get(), "0\r\n\r\n", reply_timeout);
}

HttpServer::HttpServer(const HttpOptions& options) : impl_(std::make_unique<Impl>(options)) {}

HttpServer::HttpServer(Api& api, const HttpOptions& options) : HttpServer(options) { serve(api); }

HttpServer::~HttpServer() = default;

void HttpServer::serve(Api& api) { impl_->api = &api; }

void HttpServer::prepare_to_end() {
  impl_->reply_timeout.shorten();
  impl_->is_near_end = true;
}

int HttpServer::port() const { return impl_->port; }

const std::shared_ptr<MemoryAccount>& HttpServer::memory() const { return impl_->options.memory; }

bool HttpServer::is_on_loopback() const { return impl_->is_on_loopback; }

}  // namespace common
