#include "common/serving/http_request.h"

#include <algorithm>
#include <charconv>
#include <string>
#include <system_error>

namespace common {
namespace {

constexpr std::size_t kMaxHeadBytes = 1 << 14;
constexpr std::size_t kMaxChunkLine = 256;  // a size and its extensions
constexpr std::size_t kMaxTrailerBytes = 1 << 12;

bool is_token(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
    const bool is_letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    return is_letter || (c >= '0' && c <= '9') || std::string_view("!#$%&'*+-.^_`|~").find(c) != std::string_view::npos;
  });
}

std::string_view trimmed(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(" \t");
  return begin == std::string_view::npos ? "" : text.substr(begin, text.find_last_not_of(" \t") + 1 - begin);
}

// Parses all of `text` as a number without a sign. False: it is no such number, or too large.
bool parse_size(std::string_view text, int base, std::size_t& result) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), result, base);
  return !text.empty() && error == std::errc() && end == text.data() + text.size();
}

HttpError too_large(std::size_t max_body_bytes) {
  return {413, "the body is too large: this server takes " + std::to_string(max_body_bytes) + " bytes"};
}

// Whether a list like "keep-alive, Upgrade" has the word, whatever its case.
bool has_word(std::string_view list, std::string_view word) {
  while (!list.empty()) {
    const std::size_t comma = std::min(list.find(','), list.size());
    if (to_lower(trimmed(list.substr(0, comma))) == word) {
      return true;
    }
    list.remove_prefix(std::min(comma + 1, list.size()));
  }
  return false;
}

}  // namespace

std::string to_lower(std::string_view text) {
  std::string result(text);
  std::transform(result.begin(), result.end(), result.begin(),
                 [](char c) { return static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c); });
  return result;
}

std::string HttpHead::field(std::string_view name) const {
  const auto found = std::find_if(fields.begin(), fields.end(), [&](const auto& field) { return field.first == name; });
  return found == fields.end() ? "" : found->second;
}

bool HttpHead::has(std::string_view name) const {
  return std::any_of(fields.begin(), fields.end(), [&](const auto& field) { return field.first == name; });
}

// Reads a line, without its end. False: the line is not complete. `total` counts the bytes of these lines.
bool HttpRequestReader::read_line(std::string& received, std::size_t max_bytes, std::size_t& total,
                                  std::string& line) const {
  const std::size_t end = received.find('\n');
  const std::size_t size = end == std::string::npos ? received.size() : end + 1;
  if (total + size > max_bytes) {
    throw HttpError(has_head_ ? 400 : 431, has_head_ ? "a chunk's size or the fields after the body are too long"
                                                     : "the request's head is too large");
  }
  if (end == std::string::npos) {
    return false;
  }
  if (end == 0 || received[end - 1] != '\r') {
    throw HttpError(400, "a line does not end with CR LF");
  }
  total += size;
  line = received.substr(0, end - 1);
  received.erase(0, size);
  return true;
}

bool HttpRequestReader::read_head(std::string& received) {
  std::string line;
  while (!has_head_ && read_line(received, kMaxHeadBytes, head_bytes_, line)) {
    if (head_.method.empty()) {
      if (!line.empty()) {  // some clients send an empty line after a body
        read_request_line(line);
      }
    } else if (!line.empty()) {
      read_field(line);
    } else {
      check_head();
      has_head_ = true;
    }
  }
  return has_head_;
}

void HttpRequestReader::read_request_line(const std::string& line) {
  const std::size_t first = line.find(' ');
  const std::size_t last = line.rfind(' ');
  const std::string version = last == std::string::npos ? "" : line.substr(last + 1);
  if (first == last || !is_token(std::string_view(line).substr(0, first))) {
    throw HttpError(400, "this is no HTTP request");
  }
  if (version != "HTTP/1.1" && version != "HTTP/1.0") {
    throw HttpError(version.starts_with("HTTP/") ? 505 : 400, "this server speaks HTTP/1.1");
  }
  std::string target = line.substr(first + 1, last - first - 1);
  const bool is_plain =
      std::all_of(target.begin(), target.end(), [](char c) { return c > ' ' && c < '\x7F'; });  // escaped, if not
  // "http://host/path", as a client of a proxy sends it; every server has to take it (RFC 9112, 3.2.2).
  bool has_host = true;
  for (const std::string_view scheme : {"http://", "https://"}) {
    if (to_lower(target).starts_with(scheme)) {
      const std::size_t end = std::min(target.find_first_of("/?#", scheme.size()), target.size());
      head_.authority = target.substr(scheme.size(), end - scheme.size());
      has_host = !head_.authority.empty() && !head_.authority.starts_with(':');
      target = (target.substr(end).starts_with('/') ? "" : "/") + target.substr(end);
      break;
    }
  }
  if (!target.starts_with('/') || !is_plain || !has_host) {
    throw HttpError(400, "the path is not one of this server's");
  }
  head_.method = line.substr(0, first);
  head_.path = target.substr(0, target.find_first_of("?#"));
  head_.is_version_1_0 = version == "HTTP/1.0";
}

void HttpRequestReader::read_field(const std::string& line) {
  const std::size_t colon = line.find(':');
  const std::string_view value =
      colon == std::string::npos ? std::string_view() : trimmed(std::string_view(line).substr(colon + 1));
  const bool is_text = std::all_of(value.begin(), value.end(), [](char c) {
    return c == '\t' || (static_cast<unsigned char>(c) >= ' ' && c != '\x7F');
  });
  // A line that begins with a space would continue the one before it: that is obsolete, and not a token.
  if (colon == std::string::npos || !is_token(std::string_view(line).substr(0, colon)) || !is_text) {
    throw HttpError(400, "a line of the head is no field");
  }
  head_.fields.emplace_back(to_lower(std::string_view(line).substr(0, colon)), value);
}

void HttpRequestReader::check_head() {
  for (const char* const name : {"host", "content-length", "transfer-encoding", "content-type", "authorization"}) {
    if (std::count_if(head_.fields.begin(), head_.fields.end(), [&](const auto& f) { return f.first == name; }) > 1) {
      throw HttpError(400, std::string("there are two fields of the name ") + name);
    }
  }
  if (!head_.is_version_1_0 && !head_.has("host")) {
    throw HttpError(400, "the field Host is missing");
  }
  is_chunked_ = head_.has("transfer-encoding");
  if (is_chunked_ && (head_.has("content-length") || head_.is_version_1_0)) {
    throw HttpError(400, "a body in chunks has no length, and needs HTTP/1.1");
  }
  if (is_chunked_ && to_lower(head_.field("transfer-encoding")) != "chunked") {
    throw HttpError(501, "of transfer encodings, this server knows \"chunked\"");
  }
  if (head_.has("content-length") && !parse_size(head_.field("content-length"), 10, remaining_)) {
    throw HttpError(400, "the body's length is no number");
  }
  if (remaining_ > max_body_bytes_) {
    throw too_large(max_body_bytes_);
  }
  if (head_.has("content-encoding")) {  // a small body could become a huge one
    throw HttpError(415, "compressed bodies are not supported");
  }
  if (head_.has("expect") && to_lower(head_.field("expect")) != "100-continue") {
    throw HttpError(417, "of expectations, this server knows \"100-continue\"");
  }
  const auto says = [&](std::string_view word) {  // a list, which may come in several fields
    return std::any_of(head_.fields.begin(), head_.fields.end(),
                       [&](const auto& field) { return field.first == "connection" && has_word(field.second, word); });
  };
  head_.keeps_alive = !says("close") && (!head_.is_version_1_0 || says("keep-alive"));
}

bool HttpRequestReader::read_body(std::string& received) {
  if (is_chunked_) {
    return read_chunks(received);
  }
  take(received);
  return remaining_ == 0;
}

// Removes the bytes of the body, or of the chunk, that have arrived.
void HttpRequestReader::take(std::string& received) {
  const std::size_t size = std::min(remaining_, received.size());
  body_.append(received, 0, size);
  received.erase(0, size);
  remaining_ -= size;
}

bool HttpRequestReader::read_chunks(std::string& received) {
  std::string line;
  while (part_ != Part::kEnd) {
    switch (part_) {
      case Part::kSize:
        line_bytes_ = 0;
        if (!read_line(received, kMaxChunkLine, line_bytes_, line)) {
          return false;
        }
        if (!parse_size(std::string_view(line).substr(0, line.find(';')), 16, remaining_)) {
          throw HttpError(400, "a chunk's size is no number");
        }
        if (remaining_ > max_body_bytes_ - body_.size()) {
          throw too_large(max_body_bytes_);
        }
        part_ = remaining_ > 0 ? Part::kData : Part::kTrailer;
        line_bytes_ = 0;
        break;
      case Part::kData:
        take(received);
        if (remaining_ > 0) {
          return false;
        }
        part_ = Part::kDataEnd;
        break;
      case Part::kDataEnd:
        line_bytes_ = 0;
        if (!read_line(received, 2, line_bytes_, line)) {
          return false;
        }
        part_ = Part::kSize;
        break;
      case Part::kTrailer:
        if (!read_line(received, kMaxTrailerBytes, line_bytes_, line)) {
          return false;
        }
        part_ = line.empty() ? Part::kEnd : Part::kTrailer;
        break;
      case Part::kEnd:
        break;
    }
  }
  return true;
}

}  // namespace common
