#include "common/model/gguf.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "common/base/check.h"
#include "common/base/platform.h"
#include "common/base/text.h"
#include "common/model/dequantize.h"

namespace common {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers are copied from the file as they are");

constexpr std::string_view kMagic = "GGUF";
constexpr std::uint32_t kOldestVersion = 2;
constexpr std::uint32_t kNewestVersion = 3;
constexpr std::uint64_t kDefaultAlignment = 32;
constexpr std::uint64_t kMaxAlignment = 65536;
constexpr std::uint64_t kMaxKeyLength = 65535;
constexpr std::uint64_t kMaxTensorNameLength = 64;
constexpr std::uint32_t kMaxDimensions = 4;
// Vocabularies and merge lists, the longest arrays of real files, have less than a million entries. A string of no
// characters takes 8 bytes in the file and 32 in memory, so the limit also bounds the memory that a hostile file can
// occupy.
constexpr std::uint64_t kMaxArrayLength = std::uint64_t{1} << 24U;
// Keeps the size of a tensor, at most four bytes per element, within 63 bits.
constexpr std::int64_t kMaxElements = std::numeric_limits<std::int64_t>::max() / 8;

// The fewest bytes that an entry can take. Counts are checked against them before memory is reserved.
constexpr std::uint64_t kMinPairBytes = 8 + 1 + 4 + 1;            // key length, key, value type, value
constexpr std::uint64_t kMinTensorBytes = 8 + 1 + 4 + 8 + 4 + 8;  // name length, name, count, dimension, type, offset

enum class ValueType : std::uint32_t {
  kUint8,
  kInt8,
  kUint16,
  kInt16,
  kUint32,
  kInt32,
  kFloat32,
  kBool,
  kString,
  kArray,
  kUint64,
  kInt64,
  kFloat64,
};
constexpr std::uint32_t kNumValueTypes = 13;

// Names of all of ggml's tensor types, so that an error can say what a file holds. Types that ggml removed are empty.
constexpr std::array<std::string_view, 42> kTensorTypeNames = {
    "F32",   "F16",    "Q4_0",  "Q4_1", "",     "",        "Q5_0",   "Q5_1",    "Q8_0",  "Q8_1",   "Q2_K",
    "Q3_K",  "Q4_K",   "Q5_K",  "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S",
    "IQ2_S", "IQ4_XS", "I8",    "I16",  "I32",  "I64",     "F64",    "IQ1_M",   "BF16",  "",       "",
    "",      "TQ1_0",  "TQ2_0", "",     "",     "",        "MXFP4",  "NVFP4",   "Q1_0"};

constexpr std::array<TensorType, 14> kSupportedTypes = {
    TensorType::F32,  TensorType::F16,  TensorType::BF16, TensorType::Q8_0,  TensorType::Q4_0,
    TensorType::Q4_1, TensorType::Q5_0, TensorType::Q5_1, TensorType::Q2_K,  TensorType::Q3_K,
    TensorType::Q4_K, TensorType::Q5_K, TensorType::Q6_K, TensorType::IQ4_NL};

std::string list_supported_types() {
  std::string list;
  for (const TensorType type : kSupportedTypes) {
    list += (list.empty() ? "" : ", ") + std::string(type_name(type));
  }
  return list;
}

std::string describe_tensor_type(std::uint32_t type) {
  if (type < kTensorTypeNames.size() && !kTensorTypeNames[type].empty()) {
    return std::string(kTensorTypeNames[type]);
  }
  return "of unknown type " + std::to_string(type);
}

std::string format_shape(std::span<const std::int64_t> shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + "]";
}

constexpr std::uint64_t align_up(std::uint64_t value, std::uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

// A cursor over the file. Every read is first checked against the end.
class Reader {
 public:
  Reader(std::span<const std::byte> bytes, const std::string& name) : bytes_(bytes), name_(name) {}

  [[noreturn]] void fail(const std::string& message) const { throw InputError(name_ + ": " + message); }

  // Names what is read next, for errors.
  void enter(std::string what) { what_ = std::move(what); }
  const std::string& what() const { return what_; }

  std::uint64_t position() const { return position_; }
  std::uint64_t remaining() const { return bytes_.size() - position_; }

  std::span<const std::byte> read_bytes(std::uint64_t count) {
    if (count > remaining()) {
      fail("the file is cut short or damaged: " + what_ + " needs " + std::to_string(count) + " bytes at byte " +
           std::to_string(position_) + ", and only " + std::to_string(remaining()) + " are left");
    }
    const auto result = bytes_.subspan(static_cast<std::size_t>(position_), static_cast<std::size_t>(count));
    position_ += count;
    return result;
  }

  template <typename T>
  T read() {
    static_assert(std::is_arithmetic_v<T>);
    T value;
    std::memcpy(&value, read_bytes(sizeof(T)).data(), sizeof(T));  // nothing in the file need be aligned
    return value;
  }

  std::string read_string() {
    const std::span<const std::byte> text = read_bytes(read<std::uint64_t>());
    return {reinterpret_cast<const char*>(text.data()), text.size()};
  }

  // Refuses a count that the rest of the file cannot hold.
  void check_count(std::uint64_t count, std::uint64_t min_entry_bytes, const std::string& entries) const {
    if (count > remaining() / min_entry_bytes) {
      fail("the file is cut short or damaged: " + what_ + " says there are " + std::to_string(count) + " " + entries +
           ", and only " + std::to_string(remaining()) + " bytes are left");
    }
  }

 private:
  std::span<const std::byte> bytes_;
  const std::string& name_;
  std::string what_;
  std::uint64_t position_ = 0;
};

bool is_integer(ValueType type) {
  return type != ValueType::kFloat32 && type != ValueType::kFloat64 && type != ValueType::kBool &&
         type != ValueType::kString && type != ValueType::kArray;
}

// Size of a value of the type: exact for numbers, the minimum for strings and arrays.
std::uint64_t min_value_bytes(ValueType type) {
  switch (type) {
    case ValueType::kUint8:
    case ValueType::kInt8:
    case ValueType::kBool:
      return 1;
    case ValueType::kUint16:
    case ValueType::kInt16:
      return 2;
    case ValueType::kUint32:
    case ValueType::kInt32:
    case ValueType::kFloat32:
      return 4;
    case ValueType::kString:
    case ValueType::kUint64:
    case ValueType::kInt64:
    case ValueType::kFloat64:
      return 8;
    case ValueType::kArray:
      return 4 + 8;
  }
  COMMON_CHECK(false, "unknown metadata value type");
}

ValueType read_value_type(Reader& reader) {
  const auto type = reader.read<std::uint32_t>();
  if (type >= kNumValueTypes) {
    reader.fail(reader.what() + " has the unknown value type " + std::to_string(type));
  }
  return static_cast<ValueType>(type);
}

bool read_bool(Reader& reader) {
  const auto value = reader.read<std::uint8_t>();
  if (value > 1) {
    reader.fail(reader.what() + " is a bool of value " + std::to_string(value) + ", and only 0 and 1 are allowed");
  }
  return value == 1;
}

std::int64_t read_uint64(Reader& reader) {
  const auto value = reader.read<std::uint64_t>();
  if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
    reader.fail(reader.what() + " holds the integer " + std::to_string(value) + ", which does not fit in 63 bits");
  }
  return static_cast<std::int64_t>(value);
}

std::int64_t read_integer(Reader& reader, ValueType type) {
  switch (type) {
    case ValueType::kUint8:
      return reader.read<std::uint8_t>();
    case ValueType::kInt8:
      return reader.read<std::int8_t>();
    case ValueType::kUint16:
      return reader.read<std::uint16_t>();
    case ValueType::kInt16:
      return reader.read<std::int16_t>();
    case ValueType::kUint32:
      return reader.read<std::uint32_t>();
    case ValueType::kInt32:
      return reader.read<std::int32_t>();
    case ValueType::kUint64:
      return read_uint64(reader);
    case ValueType::kInt64:
      return reader.read<std::int64_t>();
    default:
      COMMON_CHECK(false, "not an integer type");
  }
}

double read_real(Reader& reader, ValueType type) {
  return type == ValueType::kFloat32 ? static_cast<double>(reader.read<float>()) : reader.read<double>();
}

template <typename T, typename ReadOne>
std::vector<T> read_many(std::uint64_t count, ReadOne read_one) {
  std::vector<T> values;
  values.reserve(static_cast<std::size_t>(count));  // the caller has checked the count against the file
  for (std::uint64_t i = 0; i < count; ++i) {
    values.push_back(read_one());
  }
  return values;
}

GgufValue read_array(Reader& reader) {
  const ValueType type = read_value_type(reader);
  if (type == ValueType::kArray) {
    reader.fail(reader.what() + " is an array of arrays, which is not supported");
  }
  const auto count = reader.read<std::uint64_t>();
  reader.check_count(count, min_value_bytes(type), "array elements");
  if (count > kMaxArrayLength) {
    reader.fail(reader.what() + " has " + std::to_string(count) + " array elements, and at most " +
                std::to_string(kMaxArrayLength) + " are supported");
  }
  if (type == ValueType::kString) {
    return read_many<std::string>(count, [&] { return reader.read_string(); });
  }
  if (type == ValueType::kFloat32 || type == ValueType::kFloat64) {
    return read_many<double>(count, [&] { return read_real(reader, type); });
  }
  if (type == ValueType::kBool) {
    return read_many<std::int64_t>(count, [&] { return std::int64_t{read_bool(reader)}; });
  }
  return read_many<std::int64_t>(count, [&] { return read_integer(reader, type); });
}

GgufValue read_value(Reader& reader, ValueType type) {
  if (is_integer(type)) {
    return read_integer(reader, type);
  }
  switch (type) {
    case ValueType::kBool:
      return read_bool(reader);
    case ValueType::kString:
      return reader.read_string();
    case ValueType::kArray:
      return read_array(reader);
    default:
      return read_real(reader, type);
  }
}

using Metadata = std::map<std::string, GgufValue, std::less<>>;
using Tensors = std::map<std::string, TensorInfo, std::less<>>;

void check_magic_and_version(Reader& reader, std::span<const std::byte> bytes) {
  if (bytes.empty()) {
    reader.fail("not a GGUF file: it is empty");
  }
  const std::size_t magic_bytes = std::min(bytes.size(), kMagic.size());
  const std::string magic(reinterpret_cast<const char*>(bytes.data()), magic_bytes);
  if (magic != kMagic) {
    reader.fail("not a GGUF file: it starts with " + quote(magic) + " in place of \"GGUF\"");
  }
  reader.enter("the header");
  reader.read_bytes(kMagic.size());
  const auto version = reader.read<std::uint32_t>();
  if (version >= kOldestVersion && version <= kNewestVersion) {
    return;
  }
  // Big-endian files have the same magic and a byte-swapped version, whose lower half is zero.
  if (version != 0 && (version & 0xFFFFU) == 0) {
    reader.fail("this is a big-endian GGUF file, and only little-endian ones are supported");
  }
  reader.fail("GGUF version " + std::to_string(version) + " is not supported (supported: 2 and 3)");
}

// The format prescribes the type of general.alignment.
void check_alignment_type(Reader& reader, ValueType type) {
  if (type != ValueType::kUint32) {
    reader.fail("general.alignment must be a uint32");
  }
}

Metadata read_metadata(Reader& reader, std::uint64_t num_pairs) {
  Metadata metadata;
  for (std::uint64_t i = 0; i < num_pairs; ++i) {
    reader.enter("the key of metadata pair " + std::to_string(i));
    const std::string key = reader.read_string();
    if (key.empty() || key.size() > kMaxKeyLength) {
      reader.fail(reader.what() + " has " + std::to_string(key.size()) + " bytes, and 1 to " +
                  std::to_string(kMaxKeyLength) + " are allowed");
    }
    reader.enter("metadata key " + quote(key));
    if (metadata.contains(key)) {
      reader.fail(reader.what() + " appears twice");
    }
    const ValueType type = read_value_type(reader);
    if (key == "general.alignment") {
      check_alignment_type(reader, type);
    }
    metadata.emplace(key, read_value(reader, type));
  }
  return metadata;
}

std::uint64_t get_alignment(const Reader& reader, const Metadata& metadata) {
  const auto found = metadata.find("general.alignment");
  if (found == metadata.end()) {
    return kDefaultAlignment;
  }
  const auto alignment = static_cast<std::uint64_t>(std::get<std::int64_t>(found->second));
  if (alignment < 8 || alignment > kMaxAlignment || !std::has_single_bit(alignment)) {
    reader.fail("general.alignment is " + std::to_string(alignment) + ", and it must be a power of two from 8 to " +
                std::to_string(kMaxAlignment));
  }
  return alignment;
}

// A tensor's entry in the table. Its data can be located only once the whole table has been read.
struct TensorEntry {
  std::string name;
  TensorInfo info;
  std::uint64_t offset = 0;  // from the start of the data section
  std::uint64_t num_bytes = 0;
};

TensorType read_tensor_type(Reader& reader) {
  const auto type = reader.read<std::uint32_t>();
  const auto is_type = [type](TensorType supported) { return static_cast<std::uint32_t>(supported) == type; };
  if (std::none_of(kSupportedTypes.begin(), kSupportedTypes.end(), is_type)) {
    reader.fail(reader.what() + " is " + describe_tensor_type(type) +
                ", which is not supported (supported: " + list_supported_types() + ")");
  }
  return static_cast<TensorType>(type);
}

// Sets shape and num_elements. The file lists the contiguous dimension first.
void read_shape(Reader& reader, TensorInfo& info) {
  const auto num_dimensions = reader.read<std::uint32_t>();
  if (num_dimensions == 0 || num_dimensions > kMaxDimensions) {
    reader.fail(reader.what() + " has " + std::to_string(num_dimensions) + " dimensions, and 1 to 4 are allowed");
  }
  info.num_elements = 1;
  for (std::uint32_t i = 0; i < num_dimensions; ++i) {
    const std::int64_t size = read_uint64(reader);
    if (size == 0) {
      reader.fail(reader.what() + " has a dimension of size 0");
    }
    if (size > kMaxElements / info.num_elements) {
      reader.fail(reader.what() + " has more elements than 60 bits can count");
    }
    info.num_elements *= size;
    info.shape.insert(info.shape.begin(), size);
  }
}

TensorEntry read_tensor_entry(Reader& reader, std::uint64_t index, std::uint64_t alignment) {
  TensorEntry entry;
  reader.enter("the name of tensor " + std::to_string(index));
  entry.name = reader.read_string();
  if (entry.name.empty() || entry.name.size() > kMaxTensorNameLength) {
    reader.fail(reader.what() + " has " + std::to_string(entry.name.size()) + " bytes, and 1 to " +
                std::to_string(kMaxTensorNameLength) + " are allowed");
  }
  reader.enter("tensor " + quote(entry.name));
  read_shape(reader, entry.info);
  entry.info.type = read_tensor_type(reader);
  entry.offset = reader.read<std::uint64_t>();
  const BlockFormat format = block_format(entry.info.type);
  if (entry.info.shape.back() % format.elements != 0) {
    reader.fail(reader.what() + " has rows of " + std::to_string(entry.info.shape.back()) +
                " elements, which is not a whole number of " + type_name(entry.info.type) + " blocks of " +
                std::to_string(format.elements));
  }
  entry.num_bytes = static_cast<std::uint64_t>(entry.info.num_elements / format.elements * format.bytes);
  if (entry.offset % alignment != 0) {
    reader.fail(reader.what() + " starts at offset " + std::to_string(entry.offset) + ", which is not a multiple of " +
                "the alignment " + std::to_string(alignment));
  }
  return entry;
}

// Sets each tensor's data, which is in the part of the file from `data_start` on.
void locate_data(const Reader& reader, std::span<const std::byte> bytes, std::uint64_t data_start,
                 std::span<TensorEntry> entries) {
  const std::uint64_t available = bytes.size() > data_start ? bytes.size() - data_start : 0;
  for (TensorEntry& entry : entries) {
    // Written so that no sum can wrap around.
    if (entry.offset > available || entry.num_bytes > available - entry.offset) {
      reader.fail("the file is cut short or damaged: tensor " + quote(entry.name) + " needs " +
                  std::to_string(entry.num_bytes) + " bytes at offset " + std::to_string(entry.offset) +
                  " of the tensor data, which has " + std::to_string(available) + " bytes");
    }
    entry.info.data =
        bytes.subspan(static_cast<std::size_t>(data_start + entry.offset), static_cast<std::size_t>(entry.num_bytes));
  }
}

// `entries` are in order of their offsets.
void check_overlap(const Reader& reader, std::span<const TensorEntry> entries) {
  for (std::size_t i = 1; i < entries.size(); ++i) {
    const TensorEntry& previous = entries[i - 1];
    if (previous.offset + previous.num_bytes > entries[i].offset) {
      reader.fail("the data of tensors " + quote(previous.name) + " and " + quote(entries[i].name) + " overlap");
    }
  }
}

Tensors read_tensors(Reader& reader, std::span<const std::byte> bytes, std::uint64_t num_tensors,
                     std::uint64_t alignment) {
  std::vector<TensorEntry> entries;
  for (std::uint64_t i = 0; i < num_tensors; ++i) {
    entries.push_back(read_tensor_entry(reader, i, alignment));
  }
  locate_data(reader, bytes, align_up(reader.position(), alignment), entries);
  std::stable_sort(entries.begin(), entries.end(),
                   [](const TensorEntry& a, const TensorEntry& b) { return a.offset < b.offset; });
  Tensors tensors;
  for (const TensorEntry& entry : entries) {
    if (!tensors.emplace(entry.name, entry.info).second) {
      reader.fail("tensor " + quote(entry.name) + " appears twice");
    }
  }
  check_overlap(reader, entries);
  return tensors;
}

struct DescribeValue {
  std::string operator()(bool) const { return "a bool"; }
  std::string operator()(std::int64_t) const { return "an integer"; }
  std::string operator()(double) const { return "a float"; }
  std::string operator()(const std::string&) const { return "a string"; }
  std::string operator()(const std::vector<std::int64_t>&) const { return "an array of integers"; }
  std::string operator()(const std::vector<double>&) const { return "an array of floats"; }
  std::string operator()(const std::vector<std::string>&) const { return "an array of strings"; }
};

const GgufValue* find_value(const Metadata& metadata, std::string_view key) {
  const auto found = metadata.find(key);
  return found == metadata.end() ? nullptr : &found->second;
}

const GgufValue& require_value(const Metadata& metadata, std::string_view key, const std::string& file) {
  const GgufValue* value = find_value(metadata, key);
  if (value == nullptr) {
    throw InputError(file + ": metadata key " + quote(key) + " is missing");
  }
  return *value;
}

template <typename T>
const T& value_as(const GgufValue& value, std::string_view key, const std::string& file) {
  if (const T* result = std::get_if<T>(&value)) {
    return *result;
  }
  throw InputError(file + ": metadata key " + quote(key) + " is " + std::visit(DescribeValue{}, value) +
                   ", and must be " + DescribeValue{}(T{}));
}

double value_as_float(const GgufValue& value, std::string_view key, const std::string& file) {
  if (const auto* integer = std::get_if<std::int64_t>(&value)) {
    return static_cast<double>(*integer);
  }
  const auto result = value_as<double>(value, key, file);
  if (!std::isfinite(result)) {
    throw InputError(file + ": metadata key " + quote(key) + " is " + std::to_string(result) +
                     ", and must be a finite number");
  }
  return result;
}

}  // namespace

struct Gguf::Impl {
  // The mapping owns the bytes; for parse() there is none, and the caller owns them.
  Impl(std::string file_name, std::shared_ptr<const MappedFile> file_mapping, std::span<const std::byte> bytes)
      : name(std::move(file_name)), mapping(std::move(file_mapping)) {
    Reader reader(bytes, name);
    check_magic_and_version(reader, bytes);
    const auto num_tensors = reader.read<std::uint64_t>();
    const auto num_pairs = reader.read<std::uint64_t>();
    reader.check_count(num_pairs, kMinPairBytes, "metadata pairs");
    reader.check_count(num_tensors, kMinTensorBytes, "tensors");
    metadata = read_metadata(reader, num_pairs);
    check_whole();
    tensors = read_tensors(reader, bytes, num_tensors, get_alignment(reader, metadata));
  }

  // Large models come in several files.
  void check_whole() const {
    const GgufValue* const count = find_value(metadata, "split.count");
    const std::int64_t num_parts = count == nullptr ? 1 : value_as<std::int64_t>(*count, "split.count", name);
    if (num_parts > 1) {
      const GgufValue* const number = find_value(metadata, "split.no");
      const std::int64_t part = number == nullptr ? 0 : value_as<std::int64_t>(*number, "split.no", name);
      throw InputError(name + format(": this is part %lld of %lld of a model (split.count); llama-gguf-split --merge "
                                     "makes one file of them",
                                     static_cast<long long>(part) + 1, static_cast<long long>(num_parts)));
    }
  }

  std::string name;
  std::shared_ptr<const MappedFile> mapping;
  Metadata metadata;
  Tensors tensors;
};

Gguf::Gguf(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Gguf::Gguf(Gguf&&) noexcept = default;
Gguf& Gguf::operator=(Gguf&&) noexcept = default;
Gguf::~Gguf() = default;

Gguf Gguf::open(const std::string& path) {
  auto mapping = std::make_shared<const MappedFile>(path);
  const std::span<const std::byte> bytes = mapping->bytes();
  return Gguf(std::make_unique<Impl>(path, std::move(mapping), bytes));
}

Gguf Gguf::parse(std::span<const std::byte> bytes, const std::string& name) {
  return Gguf(std::make_unique<Impl>(name, nullptr, bytes));
}

const std::string& Gguf::name() const { return impl_->name; }

std::shared_ptr<const void> Gguf::mapping() const { return impl_->mapping; }

bool Gguf::has(std::string_view key) const { return impl_->metadata.contains(key); }

bool Gguf::has_ints(std::string_view key) const {
  const GgufValue* value = find_value(impl_->metadata, key);
  return value != nullptr && std::holds_alternative<std::vector<std::int64_t>>(*value);
}

std::vector<std::string> Gguf::keys() const {
  std::vector<std::string> keys;
  for (const auto& [key, value] : impl_->metadata) {
    keys.push_back(key);
  }
  return keys;
}

std::int64_t Gguf::get_int(std::string_view key) const {
  return value_as<std::int64_t>(require_value(impl_->metadata, key, name()), key, name());
}

std::int64_t Gguf::get_int(std::string_view key, std::int64_t fallback) const {
  const GgufValue* value = find_value(impl_->metadata, key);
  return value == nullptr ? fallback : value_as<std::int64_t>(*value, key, name());
}

double Gguf::get_float(std::string_view key) const {
  return value_as_float(require_value(impl_->metadata, key, name()), key, name());
}

double Gguf::get_float(std::string_view key, double fallback) const {
  const GgufValue* value = find_value(impl_->metadata, key);
  return value == nullptr ? fallback : value_as_float(*value, key, name());
}

bool Gguf::get_bool(std::string_view key, bool fallback) const {
  const GgufValue* value = find_value(impl_->metadata, key);
  return value == nullptr ? fallback : value_as<bool>(*value, key, name());
}

const std::string& Gguf::get_string(std::string_view key) const {
  return value_as<std::string>(require_value(impl_->metadata, key, name()), key, name());
}

const std::vector<std::string>& Gguf::get_strings(std::string_view key) const {
  return value_as<std::vector<std::string>>(require_value(impl_->metadata, key, name()), key, name());
}

const std::vector<std::int64_t>& Gguf::get_ints(std::string_view key) const {
  return value_as<std::vector<std::int64_t>>(require_value(impl_->metadata, key, name()), key, name());
}

const std::vector<double>& Gguf::get_floats(std::string_view key) const {
  return value_as<std::vector<double>>(require_value(impl_->metadata, key, name()), key, name());
}

const std::map<std::string, TensorInfo, std::less<>>& Gguf::tensors() const { return impl_->tensors; }

bool Gguf::has_tensor(std::string_view name) const { return impl_->tensors.contains(name); }

void Gguf::check_tensor(std::string_view name, std::span<const std::int64_t> shape) const {
  const auto found = impl_->tensors.find(name);
  if (found == impl_->tensors.end()) {
    throw InputError(impl_->name + ": tensor " + quote(name) + " is missing; it must have shape " +
                     format_shape(shape));
  }
  const std::vector<std::int64_t>& actual = found->second.shape;
  if (!std::equal(actual.begin(), actual.end(), shape.begin(), shape.end())) {
    throw InputError(impl_->name + ": tensor " + quote(name) + " has shape " + format_shape(actual) +
                     ", and must have " + format_shape(shape));
  }
}

void Gguf::read_tensor(std::string_view name, std::span<const std::int64_t> shape, std::span<float> out) const {
  check_tensor(name, shape);
  const TensorInfo& info = impl_->tensors.find(name)->second;
  COMMON_CHECK(out.size() == static_cast<std::size_t>(info.num_elements), "the output must hold the whole tensor");
  dequantize(info.type, info.data, out);
  if (impl_->mapping != nullptr) {
    drop_pages(info.data);
  }
}

}  // namespace common
