// JSON documents from clients and for clients. nlohmann's parser reads them, but its values can't hold them: to take a
// list or an object down they allocate, and when that fails, as it may in the middle of handling a lack of memory, the
// program ends. Taking these values down needs no memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <ranges>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "common/base/check.h"

namespace common {

// Functions have the names and meanings of nlohmann::ordered_json's. But if an object has a name twice, the last value
// counts, and both are listed.
class Json {
 public:
  struct Entry;
  struct Member;

  Json() = default;  // null
  Json(std::nullptr_t) {}
  template <typename Number>
  requires std::is_arithmetic_v<Number> Json(Number number) {
    if constexpr (std::is_same_v<Number, bool>) {
      value_ = number;
    } else if constexpr (std::is_floating_point_v<Number>) {
      value_ = static_cast<double>(number);
    } else if constexpr (std::is_signed_v<Number>) {
      set_integer(number);
    } else {
      value_ = static_cast<std::uint64_t>(number);
    }
  }
  Json(std::string_view text) : value_(std::make_unique<std::string>(text)) {}
  Json(const char* text) : Json(std::string_view(text)) {}
  Json(const std::string& text) : Json(std::string_view(text)) {}
  Json(std::string&& text) : value_(std::make_unique<std::string>(std::move(text))) {}
  // A list, of anything that values are made of.
  template <typename Values>
  requires(!std::is_same_v<Values, Json> && !std::is_convertible_v<Values, std::string_view> &&
           std::ranges::range<Values>) Json(const Values& values)
      : value_(std::make_unique<Array>()) {
    for (const auto& value : values) {
      push_back(value);
    }
  }
  // An object if all entries are pairs of a name and a value, else a list.
  Json(std::initializer_list<Entry> entries);
  static Json array(std::initializer_list<Entry> entries = {});
  static Json object();
  // Throws JsonError, with the place and the reason, and for lists and objects that are more than max_depth deep.
  static Json parse(std::string_view text, int max_depth);

  Json(const Json& other);
  Json(Json&& other) noexcept = default;
  Json& operator=(Json other) noexcept {
    value_ = std::move(other.value_);
    return *this;
  }
  ~Json() = default;

  bool is_null() const { return std::holds_alternative<std::monostate>(value_); }
  bool is_boolean() const { return std::holds_alternative<bool>(value_); }
  bool is_number_unsigned() const { return std::holds_alternative<std::uint64_t>(value_); }
  bool is_number_integer() const { return is_number_unsigned() || std::holds_alternative<std::int64_t>(value_); }
  bool is_number() const { return is_number_integer() || std::holds_alternative<double>(value_); }
  bool is_string() const { return std::holds_alternative<Text>(value_); }
  bool is_array() const { return std::holds_alternative<List>(value_); }
  bool is_object() const { return std::holds_alternative<Members>(value_); }

  // The value as a number, a flag or a text. It must be one.
  template <typename T>
  T get() const {
    if constexpr (std::is_same_v<T, bool>) {
      return std::get<bool>(value_);
    } else if constexpr (std::is_same_v<T, std::string>) {
      return text();
    } else {
      return std::visit(
          [](const auto& value) -> T {
            if constexpr (std::is_arithmetic_v<std::remove_cvref_t<decltype(value)>>) {
              return static_cast<T>(value);
            }
            throw CheckError("the JSON value is no number");
          },
          value_);
    }
  }
  const std::string& text() const { return *std::get<Text>(value_); }
  bool operator==(std::string_view wanted) const { return is_string() && text() == wanted; }
  bool operator==(const char* wanted) const { return *this == std::string_view(wanted); }
  bool operator==(int wanted) const { return is_number() && get<double>() == wanted; }

  // Of a list or an object; null has no entries, anything else one.
  bool empty() const { return size() == 0; }
  std::size_t size() const;

  // Of a list. Null becomes one.
  void push_back(Json value);
  const Json& front() const { return list().front(); }
  Json& back() { return std::get<List>(value_)->back(); }
  const Json* begin() const { return list().data(); }
  const Json* end() const { return list().data() + list().size(); }
  Json* begin() { return std::get<List>(value_)->data(); }
  Json* end() { return begin() + size(); }

  // Of an object. Null becomes one.
  Json& operator[](std::string_view name);
  void emplace(std::string name, Json value);     // unless there is one of the name
  const Json* find(std::string_view name) const;  // null: there is none
  const Json& at(std::string_view name) const;    // null value: there is none
  const std::vector<Member>& items() const;
  std::vector<Member>& items();

  // Without spaces. Bytes that are no UTF-8 become U+FFFD: a reply may end in the middle of a character, and errors
  // quote a client's text.
  std::string dump() const;

 private:
  using Array = std::vector<Json>;
  using Object = std::vector<Member>;
  using Text = std::unique_ptr<std::string>;
  using List = std::unique_ptr<Array>;
  using Members = std::unique_ptr<Object>;

  const Array& list() const { return *std::get<List>(value_); }
  void set_integer(std::int64_t number);
  void write(std::string& output) const;

  std::variant<std::monostate, bool, std::int64_t, std::uint64_t, double, Text, List, Members> value_;
};

struct Json::Member {
  std::string name;
  Json value;
};

// In braces: moved into the value that is made of it.
struct Json::Entry {
  // Never in place of copying or moving: Entry is excluded.
  template <typename Value>
  requires(!std::is_same_v<std::remove_cvref_t<Value>, Entry> && std::is_constructible_v<Json, Value>)
      Entry(Value&& made)  // NOLINT(bugprone-forwarding-reference-overload)
      : value(std::forward<Value>(made)) {}
  Entry(std::initializer_list<Entry> entries) : value(entries) {}

  mutable Json value;
};

// The text is no JSON. Says what it is or has instead: "is not JSON: at byte 3: …".
class JsonError : public InputError {
 public:
  using InputError::InputError;
};

// Upper bounds of what reading a text makes of it, without reading it.
struct JsonSize {
  std::size_t num_values = 0;  // names included
  std::size_t text_bytes = 0;  // of all texts and names
};
JsonSize json_size(std::string_view text);

}  // namespace common
