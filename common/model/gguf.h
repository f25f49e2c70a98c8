// Reads GGUF, the file format of llama.cpp: metadata (key -> value), then a table of tensors, then their data.
// Versions 2 and 3, little-endian. The file is memory-mapped, so opening costs the header only.
// Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "common/model/tensor_type.h"

namespace common {

struct TensorInfo {
  TensorType type = TensorType::F32;
  std::vector<std::int64_t> shape;  // row-major, as numpy would print it: GGUF lists the same numbers in reverse
  std::int64_t num_elements = 0;
  std::span<const std::byte> data;  // as stored: the quantised blocks of a row are contiguous
};

// Integers are widened to int64 (a uint64 that does not fit is refused) and floats to double, in arrays too.
using GgufValue = std::variant<bool, std::int64_t, double, std::string, std::vector<std::int64_t>, std::vector<double>,
                               std::vector<std::string>>;

class Gguf {
 public:
  // Maps the file. Throws InputError, one line that begins with `path`, if the file cannot be opened, is a directory,
  // is not GGUF or is malformed in any way. Never reads past the end, and checks every count before allocating by it.
  static Gguf open(const std::string& path);

  // The same for bytes in memory, which must outlive the object and every model read from it. Errors have `name` in
  // place of the path.
  static Gguf parse(std::span<const std::byte> bytes, const std::string& name);

  Gguf(Gguf&&) noexcept;
  Gguf& operator=(Gguf&&) noexcept;
  Gguf(const Gguf&) = delete;
  Gguf& operator=(const Gguf&) = delete;
  ~Gguf();

  const std::string& name() const;

  // The bytes of the tensors stay in memory as long as a copy of this pointer; null if parse() was given the bytes.
  std::shared_ptr<const void> mapping() const;

  bool has(std::string_view key) const;
  // Whether the value is an array of integers or bools.
  bool has_ints(std::string_view key) const;
  std::vector<std::string> keys() const;  // of all metadata, in order of their bytes

  // The value of a key. Throws InputError with the key if it is missing, of another type or out of range. get_float
  // accepts integers too. With a fallback, a missing key is no error.
  std::int64_t get_int(std::string_view key) const;
  std::int64_t get_int(std::string_view key, std::int64_t fallback) const;
  double get_float(std::string_view key) const;
  double get_float(std::string_view key, double fallback) const;
  bool get_bool(std::string_view key, bool fallback) const;
  const std::string& get_string(std::string_view key) const;
  const std::vector<std::string>& get_strings(std::string_view key) const;
  const std::vector<std::int64_t>& get_ints(std::string_view key) const;
  const std::vector<double>& get_floats(std::string_view key) const;

  const std::map<std::string, TensorInfo, std::less<>>& tensors() const;
  bool has_tensor(std::string_view name) const;

  // Throws InputError with name and shape unless the tensor exists and has this shape.
  void check_tensor(std::string_view name, std::span<const std::int64_t> shape) const;

  // Checks the same, and writes the elements to `out` as floats: row-major, exactly num_elements. The pages that were
  // read may be dropped from memory afterwards, so that a model is not resident twice.
  void read_tensor(std::string_view name, std::span<const std::int64_t> shape, std::span<float> out) const;

 private:
  struct Impl;
  explicit Gguf(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace common
