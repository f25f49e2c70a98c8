// The bytes of an HTTP/1.1 request (RFC 9112), read as they come in: a head, then a body that has a length or comes in
// chunks. Strict: a lone LF, two lengths, or a length beside chunks is refused, so that a proxy and this server never
// disagree on where a request ends.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace common {

// The request is malformed or too large. Later bytes on the connection can't be understood either.
class HttpError : public std::runtime_error {
 public:
  HttpError(int status, const std::string& message) : std::runtime_error(message), status_(status) {}
  int status() const { return status_; }

 private:
  int status_;
};

struct HttpHead {
  std::string method;
  std::string path;            // without the query, and without scheme and host
  std::string authority = {};  // the target's host, which then takes the place of the field (RFC 9112, 3.2.2)
  std::vector<std::pair<std::string, std::string>> fields;  // names in lower case
  bool is_version_1_0 = false;
  bool keeps_alive = false;  // the client may send another request on the connection

  // Empty: there is no such field. The name is in lower case.
  std::string field(std::string_view name) const;
  bool has(std::string_view name) const;
};

// ASCII letters only: field names, schemes and media types ignore their case.
std::string to_lower(std::string_view text);

class HttpRequestReader {
 public:
  explicit HttpRequestReader(std::size_t max_body_bytes) : max_body_bytes_(max_body_bytes) {}

  // Both remove the request's bytes from the front of `received`, and return whether the head, or the whole request, is
  // complete. Both throw HttpError.
  bool read_head(std::string& received);
  bool read_body(std::string& received);

  bool has_begun() const { return head_bytes_ > 0; }
  bool has_head() const { return has_head_; }
  const HttpHead& head() const { return head_; }
  const std::string& body() const { return body_; }
  // The bytes that the body has at the most, once the head is complete.
  std::size_t max_size() const { return is_chunked_ ? max_body_bytes_ : body_.size() + remaining_; }
  std::string take_body() { return std::move(body_); }

 private:
  enum class Part { kSize, kData, kDataEnd, kTrailer, kEnd };  // of a body in chunks

  bool read_line(std::string& received, std::size_t max_bytes, std::size_t& total, std::string& line) const;
  void read_request_line(const std::string& line);
  void read_field(const std::string& line);
  void check_head();
  bool read_chunks(std::string& received);
  void take(std::string& received);

  std::size_t max_body_bytes_;
  HttpHead head_;
  bool has_head_ = false;
  std::size_t head_bytes_ = 0;
  bool is_chunked_ = false;
  std::size_t remaining_ = 0;  // bytes that the body, or the chunk, still lacks
  Part part_ = Part::kSize;
  std::size_t line_bytes_ = 0;  // bytes of a chunk's size line, or of all fields after the chunks
  std::string body_;
};

}  // namespace common
