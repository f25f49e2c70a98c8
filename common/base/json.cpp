#include "common/base/json.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <nlohmann/json.hpp>

#include "common/base/text.h"

namespace common {
namespace {

// Taken down without memory too: a text by itself is.
std::string json_text(std::string_view text) {
  const bool is_plain =
      std::all_of(text.begin(), text.end(), [](char c) { return c >= ' ' && c < '\x7F' && c != '"' && c != '\\'; });
  if (is_plain) {
    return std::string("\"").append(text).append("\"");
  }
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// Where the text stops being JSON, and why. The library's message: "[...] parse error at line 1, column 8: syntax error
// while parsing value - invalid literal; last read: 'x'; expected ...".
std::string problem_of(std::size_t byte, const nlohmann::json::exception& error) {
  constexpr int kOutOfRange = 406;  // "[...] number overflow parsing '1e999'"
  constexpr std::size_t kMaxShown = 64;
  const std::string_view what = error.what();
  if (error.id == kOutOfRange) {
    const std::size_t begin = std::min(what.find('\''), what.size() - 1) + 1;
    return "has a number that is out of range: " +
           quote(std::string(what.substr(begin, what.rfind('\'') - begin)), kMaxShown);
  }
  if (what.find("surrogate") != std::string_view::npos) {
    return format("has an unpaired surrogate at byte %zu: \\uD800 to \\uDBFF needs one of \\uDC00 to \\uDFFF after it",
                  byte);
  }
  const std::string_view separator = " - ";
  const std::size_t found = what.find(separator);
  std::string_view reason = found == std::string_view::npos ? what : what.substr(found + separator.size());
  for (const char* const later : {"; last read", "; expected"}) {
    reason = reason.substr(0, reason.find(later));
  }
  return format("is not JSON: at byte %zu: ", byte).append(reason);
}

// Builds the document from what the library's parser reads. The names are the library's.
class Builder {
 public:
  Builder(Json& document, int max_depth) : document_(document), max_depth_(static_cast<std::size_t>(max_depth)) {}

  bool null() { return add({}); }
  bool boolean(bool value) { return add(value); }
  bool number_integer(std::int64_t value) { return add(value); }
  bool number_unsigned(std::uint64_t value) { return add(value); }
  bool number_float(double value, const std::string&) { return add(value); }
  bool string(std::string& value) { return add(std::move(value)); }
  bool binary(std::vector<std::uint8_t>&) { return false; }
  bool start_object(std::size_t) { return open(Json::object()); }
  bool start_array(std::size_t) { return open(Json::array()); }
  bool end_object() { return close(); }
  bool end_array() { return close(); }
  bool key(std::string& name) {
    open_.back()->items().push_back({std::move(name), {}});
    return true;
  }
  [[noreturn]] bool parse_error(std::size_t byte, const std::string&, const nlohmann::json::exception& error) {
    throw JsonError(problem_of(byte, error));
  }

 private:
  Json& place(Json value) {
    Json* added = &document_;
    if (!open_.empty() && open_.back()->is_array()) {
      open_.back()->push_back(std::move(value));
      return open_.back()->back();
    }
    if (!open_.empty()) {
      added = &open_.back()->items().back().value;
    }
    *added = std::move(value);
    return *added;
  }
  bool add(Json value) {
    place(std::move(value));
    return true;
  }
  bool open(Json value) {
    if (open_.size() > max_depth_) {
      throw JsonError(format("has lists and objects more than %zu deep", max_depth_));
    }
    open_.push_back(&place(std::move(value)));
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  Json& document_;
  std::size_t max_depth_;
  std::vector<Json*> open_;  // lists and objects that have not ended, outermost first
};

}  // namespace

Json::Json(std::initializer_list<Entry> entries) {
  const bool is_object = std::all_of(entries.begin(), entries.end(), [](const Entry& entry) {
    return entry.value.is_array() && entry.value.size() == 2 && entry.value.front().is_string();
  });
  if (!is_object) {
    *this = array(entries);
    return;
  }
  value_ = std::make_unique<Object>();
  items().reserve(entries.size());
  for (const Entry& entry : entries) {
    Json* const pair = entry.value.begin();
    (*this)[pair[0].text()] = std::move(pair[1]);
  }
}

Json Json::array(std::initializer_list<Entry> entries) {
  Json result;
  auto list = std::make_unique<Array>();
  list->reserve(entries.size());
  for (const Entry& entry : entries) {
    list->push_back(std::move(entry.value));
  }
  result.value_ = std::move(list);
  return result;
}

Json Json::object() {
  Json result;
  result.value_ = std::make_unique<Object>();
  return result;
}

Json::Json(const Json& other) {
  std::visit(
      [this](const auto& value) {
        using Value = std::remove_cvref_t<decltype(value)>;
        if constexpr (std::is_same_v<Value, Text> || std::is_same_v<Value, List> || std::is_same_v<Value, Members>) {
          value_ = std::make_unique<typename Value::element_type>(*value);
        } else {
          value_ = value;
        }
      },
      other.value_);
}

// As the library's parser has it: what is not negative is unsigned.
void Json::set_integer(std::int64_t number) {
  if (number < 0) {
    value_ = number;
  } else {
    value_ = static_cast<std::uint64_t>(number);
  }
}

std::size_t Json::size() const { return is_array() ? list().size() : is_object() ? items().size() : is_null() ? 0 : 1; }

void Json::push_back(Json value) {
  if (is_null()) {
    value_ = std::make_unique<Array>();
  }
  std::get<List>(value_)->push_back(std::move(value));
}

Json& Json::operator[](std::string_view name) {
  if (is_null()) {
    value_ = std::make_unique<Object>();
  }
  if (const Json* const found = find(name); found != nullptr) {
    return const_cast<Json&>(*found);  // of this value, which is not constant
  }
  items().push_back({std::string(name), {}});
  return items().back().value;
}

void Json::emplace(std::string name, Json value) {
  if (find(name) == nullptr) {
    items().push_back({std::move(name), std::move(value)});
  }
}

const Json* Json::find(std::string_view name) const {
  const auto found =
      std::find_if(items().rbegin(), items().rend(), [&](const Member& member) { return member.name == name; });
  return found == items().rend() ? nullptr : &found->value;
}

const Json& Json::at(std::string_view name) const {
  static const Json null;
  const Json* const found = find(name);
  return found == nullptr ? null : *found;
}

const std::vector<Json::Member>& Json::items() const { return *std::get<Members>(value_); }

std::vector<Json::Member>& Json::items() { return *std::get<Members>(value_); }

std::string Json::dump() const {
  std::string output;
  write(output);
  return output;
}

void Json::write(std::string& output) const {
  const auto write_list = [&](char first, const auto& entries, char last, const auto& write_entry) {
    output += first;
    bool is_first = true;
    for (const auto& entry : entries) {
      output += is_first ? "" : ",";
      is_first = false;
      write_entry(entry);
    }
    output += last;
  };
  if (is_array()) {
    write_list('[', list(), ']', [&](const Json& entry) { entry.write(output); });
  } else if (is_object()) {
    write_list('{', items(), '}', [&](const Member& member) {
      output.append(json_text(member.name)).append(":");
      member.value.write(output);
    });
  } else if (is_string()) {
    output += json_text(text());
  } else if (is_boolean()) {
    output += get<bool>() ? "true" : "false";
  } else if (is_null()) {
    output += "null";
  } else if (is_number_integer()) {
    output += is_number_unsigned() ? std::to_string(get<std::uint64_t>()) : std::to_string(get<std::int64_t>());
  } else {
    output += nlohmann::json(get<double>()).dump();
  }
}

Json Json::parse(std::string_view text, int max_depth) {
  Json document;
  Builder builder(document, max_depth);
  nlohmann::json::sax_parse(text.begin(), text.end(), &builder);
  return document;
}

JsonSize json_size(std::string_view text) {
  JsonSize size{1, 0};
  bool is_in_text = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    size.text_bytes += is_in_text ? 1 : 0;
    if (is_in_text && text[i] == '\\') {
      i += 1;
    } else if (text[i] == '"') {
      is_in_text = !is_in_text;
    } else if (!is_in_text && std::string_view("[{,:").find(text[i]) != std::string_view::npos) {
      size.num_values += 1;
    }
  }
  return size;
}

}  // namespace common
