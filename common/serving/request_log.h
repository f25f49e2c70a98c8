// A line of the server's terminal for each request.
#pragma once

#include <optional>
#include <string>

#include "common/serving/api.h"

namespace common {

struct AnsweredRequest {
  std::string method = {};  // empty: what came was no request
  std::string path = {};
  int status = 0;
  std::optional<ReplyFigures> figures = {};
  double seconds = 0.0;      // from the request's last byte to the reply's
  bool is_read = true;       // by the client, to its end
  std::string id = {};       // of the reply's X-Request-Id
  std::string problem = {};  // why it was refused; may have a client's text in it
};

// "POST /v1/completions 200, 5 tokens in (0 cached), 12 out, 34 ms: length, cmpl-1". What comes from a client is
// shortened, and escaped where it would do something to a terminal.
std::string log_line(const AnsweredRequest& request);

// Whether it is worth a line: requests that programs send every few seconds are not, unless something is wrong.
bool is_logged(const AnsweredRequest& request);

}  // namespace common
