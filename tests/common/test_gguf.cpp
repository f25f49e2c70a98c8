// The GGUF reader: what it reads, what it refuses and with which message, and the numbers that it makes of stored
// tensors.
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "common/base/check.h"
#include "common/model/dequantize.h"
#include "common/model/gguf.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/gguf_builder.h"
#include "tests/support/messages.h"
#include "tests/support/paths.h"

using common::Gguf;
using common::InputError;
using common::TensorType;
using tests::append;
using tests::Bytes;
using tests::contains;
using tests::error_of;
using tests::GgufBuilder;
using tests::source_path;

namespace {

const std::string kModelPath = source_path("common/model/tales/tales-5m-q8_0.gguf");

// The error about a malformed file, without the file's name, which must come first. "" if the file is accepted.
std::string parse_error(const Bytes& bytes) {
  const std::string message = error_of([&] { Gguf::parse(bytes, "bad.gguf"); });
  if (message.empty()) {
    return "";
  }
  CHECK(message.find('\n') == std::string::npos);
  CHECK(message.starts_with("bad.gguf: "));
  return message.substr(std::string("bad.gguf: ").size());
}

std::string parse_error(const GgufBuilder& builder) { return parse_error(builder.build()); }

// A builder with one tensor, whose entry is given as it is in the file.
GgufBuilder with_tensor(const std::vector<std::uint64_t>& dimensions, TensorType type, std::size_t num_bytes) {
  GgufBuilder builder;
  builder.tensors.push_back({"weight", dimensions, static_cast<std::uint32_t>(type), Bytes(num_bytes), {}});
  return builder;
}

std::vector<float> read_all(const Gguf& file, const std::string& name) {
  const common::TensorInfo& info = file.tensors().at(name);
  std::vector<float> values(static_cast<std::size_t>(info.num_elements));
  file.read_tensor(name, info.shape, values);
  return values;
}

// A new folder among the system's temporary ones, removed at the end.
class TemporaryFolder {
 public:
  TemporaryFolder() : path_(std::filesystem::temp_directory_path() / ("test_gguf_" + std::to_string(::getpid()))) {
    std::filesystem::create_directories(path_);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  TemporaryFolder(TemporaryFolder&&) = delete;
  TemporaryFolder& operator=(TemporaryFolder&&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  std::string path(const std::string& name) const { return (path_ / name).string(); }

  std::string write(const std::string& name, const Bytes& bytes) const {
    std::ofstream stream(path(name), std::ios::binary);
    stream.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    stream.close();
    REQUIRE(stream.good());
    return path(name);
  }

 private:
  std::filesystem::path path_;
};

// IEEE 754 binary16 by its definition, in doubles.
double half_value(std::uint32_t bits) {
  const int exponent = static_cast<int>(bits >> 10U & 0x1FU);
  const int fraction = static_cast<int>(bits & 0x3FFU);
  const double sign = (bits & 0x8000U) != 0 ? -1.0 : 1.0;
  if (exponent == 31) {
    return fraction == 0 ? sign * std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  }
  return sign * (exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25));
}

std::vector<float> dequantized(TensorType type, const Bytes& data, std::size_t num_elements) {
  std::vector<float> out(num_elements, std::numeric_limits<float>::quiet_NaN());
  common::dequantize(type, data, out);
  return out;
}

constexpr std::uint16_t kHalfOne = 0x3C00;
constexpr std::uint16_t kHalfQuarter = 0x3400;
constexpr std::uint16_t kHalfMinusTwo = 0xC000;

}  // namespace

TEST_CASE("every type of metadata value is read", "[gguf]") {
  const Bytes bytes = tests::small_gguf().build();
  const Gguf file = Gguf::parse(bytes, "small.gguf");
  CHECK(file.name() == "small.gguf");
  CHECK(file.get_int("uint8") == 200);
  CHECK(file.get_int("int8") == -100);
  CHECK(file.get_int("uint16") == 60000);
  CHECK(file.get_int("int16") == -30000);
  CHECK(file.get_int("uint32") == 4000000000);
  CHECK(file.get_int("int32") == -2000000000);
  CHECK(file.get_int("uint64") == std::int64_t{1} << 62);
  CHECK(file.get_int("int64") == -(std::int64_t{1} << 62));
  CHECK(file.get_float("float32") == 0.25);
  CHECK(file.get_float("float64") == 1e300);
  CHECK(file.get_float("int8") == -100.0);
  CHECK(file.get_bool("bool", false));
  CHECK(file.get_string("string") == "text");
  CHECK(file.get_ints("uint8s") == std::vector<std::int64_t>{0, 255});
  CHECK(file.get_ints("int8s") == std::vector<std::int64_t>{-128, 127});
  CHECK(file.get_ints("uint16s") == std::vector<std::int64_t>{65535});
  CHECK(file.get_ints("int16s") == std::vector<std::int64_t>{-32768});
  CHECK(file.get_ints("uint32s") == std::vector<std::int64_t>{4294967295});
  CHECK(file.get_ints("int32s") == std::vector<std::int64_t>{-1, 2, -3});
  CHECK(file.get_ints("uint64s") == std::vector<std::int64_t>{5});
  CHECK(file.get_ints("int64s") == std::vector<std::int64_t>{-5});
  CHECK(file.get_ints("bools") == std::vector<std::int64_t>{1, 0});
  CHECK(file.get_strings("strings") == std::vector<std::string>{"", "one", "\xC4\xA0two"});
  CHECK(file.get_strings("empty").empty());
}

TEST_CASE("missing keys and values of another type are named", "[gguf]") {
  GgufBuilder builder = tests::small_gguf();
  builder.add("nan", std::numeric_limits<float>::quiet_NaN());
  const Bytes bytes = builder.build();
  const Gguf file = Gguf::parse(bytes, "small.gguf");
  CHECK(file.has("bool"));
  CHECK_FALSE(file.has("boo"));
  CHECK(file.get_int("none", 7) == 7);
  CHECK(file.get_int("uint8", 7) == 200);
  CHECK(file.get_float("none", 0.5) == 0.5);
  CHECK(file.get_float("float32", 0.5) == 0.25);
  CHECK(file.get_bool("none", true));

  CHECK(error_of([&] { file.get_int("none"); }) == "small.gguf: metadata key \"none\" is missing");
  CHECK(error_of([&] { file.get_float("none"); }) == "small.gguf: metadata key \"none\" is missing");
  CHECK(error_of([&] { file.get_string("none"); }) == "small.gguf: metadata key \"none\" is missing");
  CHECK(error_of([&] { file.get_strings("none"); }) == "small.gguf: metadata key \"none\" is missing");
  CHECK(error_of([&] { file.get_ints("none"); }) == "small.gguf: metadata key \"none\" is missing");

  CHECK(error_of([&] { file.get_int("string"); }) ==
        "small.gguf: metadata key \"string\" is a string, and must be an integer");
  CHECK(error_of([&] { file.get_int("float32", 1); }) ==
        "small.gguf: metadata key \"float32\" is a float, and must be an integer");
  CHECK(error_of([&] { file.get_int("bool"); }) ==
        "small.gguf: metadata key \"bool\" is a bool, and must be an integer");
  CHECK(error_of([&] { file.get_float("strings", 1.0); }) ==
        "small.gguf: metadata key \"strings\" is an array of strings, and must be a float");
  CHECK(error_of([&] { file.get_bool("uint8", true); }) ==
        "small.gguf: metadata key \"uint8\" is an integer, and must be a bool");
  CHECK(error_of([&] { file.get_string("float64s"); }) ==
        "small.gguf: metadata key \"float64s\" is an array of floats, and must be a string");
  CHECK(error_of([&] { file.get_ints("strings"); }) ==
        "small.gguf: metadata key \"strings\" is an array of strings, and must be an array of integers");
  CHECK(error_of([&] { file.get_strings("int8s"); }) ==
        "small.gguf: metadata key \"int8s\" is an array of integers, and must be an array of strings");
  CHECK(contains(error_of([&] { file.get_float("nan"); }), "must be a finite number"));
}

TEST_CASE("tensors have row-major shapes and their own bytes", "[gguf]") {
  GgufBuilder builder;
  Bytes data;
  for (int i = 0; i < 6; ++i) {
    append(data, static_cast<float>(i));
  }
  // The file lists the contiguous dimension first: rows of three.
  builder.tensors.push_back({"matrix", {3, 2}, 0, data, {}});
  builder.add_tensor("vector", {2}, {10.0F, 20.0F});
  const Bytes bytes = builder.build();
  const Gguf file = Gguf::parse(bytes, "two.gguf");
  REQUIRE(file.tensors().size() == 2);
  const common::TensorInfo& matrix = file.tensors().at("matrix");
  CHECK(matrix.type == TensorType::F32);
  CHECK(matrix.shape == std::vector<std::int64_t>{2, 3});
  CHECK(matrix.num_elements == 6);
  CHECK(matrix.data.size() == 24);
  CHECK(matrix.data.data() == bytes.data() + bytes.size() - 32 - 8);  // 24 bytes and padding to 32, then the vector
  CHECK(read_all(file, "matrix") == std::vector<float>{0, 1, 2, 3, 4, 5});
  CHECK(read_all(file, "vector") == std::vector<float>{10, 20});
  CHECK(file.has_tensor("vector"));
  CHECK_FALSE(file.has_tensor("vecto"));
}

TEST_CASE("read_tensor refuses missing tensors and other shapes", "[gguf]") {
  const Bytes bytes = tests::small_gguf().build();
  const Gguf file = Gguf::parse(bytes, "small.gguf");
  std::vector<float> out(6);
  const auto read = [&](const std::string& name, const std::vector<std::int64_t>& shape) {
    return error_of([&] { file.read_tensor(name, shape, out); });
  };
  CHECK(read("f32", {2, 3}).empty());
  CHECK(read("none", {2, 3}) == "small.gguf: tensor \"none\" is missing; it must have shape [2, 3]");
  CHECK(read("f32", {3, 2}) == "small.gguf: tensor \"f32\" has shape [2, 3], and must have [3, 2]");
  CHECK(read("f32", {6}) == "small.gguf: tensor \"f32\" has shape [2, 3], and must have [6]");
  CHECK(read("f32", {1, 2, 3}) == "small.gguf: tensor \"f32\" has shape [2, 3], and must have [1, 2, 3]");
  out.resize(5);
  CHECK_THROWS_AS(read("f32", {2, 3}), common::CheckError);
}

TEST_CASE("versions 2 and 3 and all allowed alignments are read", "[gguf]") {
  for (const std::uint32_t version : {2U, 3U}) {
    for (const std::uint32_t alignment : {8U, 16U, 32U, 4096U, 65536U}) {
      CAPTURE(version, alignment);
      GgufBuilder builder = tests::small_gguf();
      builder.version = version;
      builder.set_alignment(alignment);
      const Bytes bytes = builder.build();
      const Gguf file = Gguf::parse(bytes, "small.gguf");
      CHECK(file.get_int("general.alignment") == alignment);
      CHECK(read_all(file, "f32") == std::vector<float>{1, 2, 3, 4, 5, 6});
      CHECK(read_all(file, "q8_0").back() != 0.0F);
    }
  }
}

TEST_CASE("the data starts at the next multiple of the alignment", "[gguf]") {
  for (std::size_t key_length = 1; key_length <= 64; ++key_length) {  // the header ends at every place between two
    CAPTURE(key_length);
    GgufBuilder builder;
    builder.add(std::string(key_length, 'k'), true).add_tensor("a", {2}, {1.0F, 2.0F});
    const Bytes bytes = builder.build();
    CHECK(read_all(Gguf::parse(bytes, "small.gguf"), "a") == std::vector<float>{1, 2});
  }
}

TEST_CASE("a file without tensors needs no padding", "[gguf]") {
  CHECK(parse_error(GgufBuilder()).empty());
  CHECK(parse_error(GgufBuilder().add("general.name", "x")).empty());
}

TEST_CASE("nothing in the file need be aligned in memory", "[gguf]") {
  const Bytes bytes = tests::small_gguf().build();
  const Gguf file = Gguf::parse(bytes, "small.gguf");
  for (std::size_t shift = 1; shift < 8; ++shift) {
    Bytes shifted(shift);
    shifted.insert(shifted.end(), bytes.begin(), bytes.end());
    const Gguf other = Gguf::parse(std::span(shifted).subspan(shift), "shifted.gguf");
    for (const auto& [name, info] : file.tensors()) {
      CAPTURE(shift, name);
      CHECK(tests::compare_bits(read_all(other, name), read_all(file, name)).empty());
    }
  }
}

TEST_CASE("moving keeps the file open", "[gguf]") {
  Gguf first = Gguf::open(kModelPath);
  Gguf second = std::move(first);
  CHECK(second.get_int("llama.block_count") == 6);
  const Bytes bytes = tests::small_gguf().build();
  second = Gguf::parse(bytes, "small.gguf");
  CHECK(second.name() == "small.gguf");
  CHECK(read_all(second, "f32").size() == 6);
}

TEST_CASE("what is not GGUF is refused", "[gguf]") {
  CHECK(parse_error(Bytes()) == "not a GGUF file: it is empty");
  Bytes text;
  tests::append_text(text, "PK");
  CHECK(parse_error(text) == "not a GGUF file: it starts with \"PK\" in place of \"GGUF\"");
  GgufBuilder builder = tests::small_gguf();
  builder.magic = "GGML";
  CHECK(parse_error(builder) == "not a GGUF file: it starts with \"GGML\" in place of \"GGUF\"");
  builder.magic = std::string("\n\0\x01\xFF", 4);
  CHECK(contains(parse_error(builder), "not a GGUF file"));
}

TEST_CASE("other versions are refused by number, big-endian files by name", "[gguf]") {
  for (const std::uint32_t version : {0U, 1U, 4U, 0x00030003U, 0xFFFFFFFFU}) {
    GgufBuilder builder = tests::small_gguf();
    builder.version = version;
    CHECK(parse_error(builder) == "GGUF version " + std::to_string(version) + " is not supported (supported: 2 and 3)");
  }
  for (const std::uint32_t version : {0x02000000U, 0x03000000U}) {
    GgufBuilder builder = tests::small_gguf();
    builder.version = version;
    CHECK(parse_error(builder) == "this is a big-endian GGUF file, and only little-endian ones are supported");
  }
}

TEST_CASE("a part of a model is refused, with what joins the parts", "[gguf]") {
  const auto part = [](std::uint16_t number, std::uint16_t count) {
    const Bytes bytes = GgufBuilder().add("split.no", number).add("split.count", count).build();
    return error_of<InputError>([&] { Gguf::parse(bytes, "large.gguf"); });
  };
  CHECK(part(0, 2) ==
        "large.gguf: this is part 1 of 2 of a model (split.count); llama-gguf-split --merge makes one file of them");
  CHECK(contains(part(2, 3), "part 3 of 3"));
  CHECK(part(0, 1).empty());
  CHECK(part(0, 0).empty());
}

TEST_CASE("files that cannot be opened are refused by path", "[gguf]") {
  const TemporaryFolder folder;
  const auto open_error = [](const std::string& path) { return error_of([&] { Gguf::open(path); }); };

  const std::string missing = folder.path("missing.gguf");
  CHECK(open_error(missing) == missing + ": cannot open: No such file or directory");
  CHECK(open_error("") == ": cannot open: No such file or directory");
  CHECK(open_error(folder.path("")) == folder.path("") + ": it is a directory");

  const std::string empty = folder.write("empty.gguf", {});
  CHECK(open_error(empty) == empty + ": not a GGUF file: it is empty");
  const std::string below_a_file = empty + "/model.gguf";
  CHECK(open_error(below_a_file) == below_a_file + ": cannot open: Not a directory");

  // Opening a named pipe must not wait for a writer.
  const std::string pipe = folder.path("pipe.gguf");
  REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  CHECK(open_error(pipe) == pipe + ": it is not a regular file");

  const std::string loop = folder.path("loop.gguf");
  std::filesystem::create_symlink(loop, loop);
  CHECK(contains(open_error(loop), loop + ": cannot open: "));

  const std::string locked = folder.write("locked.gguf", tests::small_gguf().build());
  std::filesystem::permissions(locked, std::filesystem::perms::none);
  // The superuser may read everything.
  CHECK(open_error(locked) == (::geteuid() == 0 ? "" : locked + ": cannot open: Permission denied"));

  Bytes cut = tests::small_gguf().build();
  cut.pop_back();
  const std::string cut_path = folder.write("cut.gguf", cut);
  CHECK(open_error(cut_path).starts_with(cut_path + ": the file is cut short or damaged"));
}

TEST_CASE("a mapped file has the contents of one in memory, also when read again", "[gguf]") {
  const TemporaryFolder folder;
  // Large enough that whole pages lie in the middle of it and are dropped after reading.
  std::vector<float> values(10000);
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(i);
  }
  GgufBuilder builder = tests::small_gguf();
  builder.add_tensor("large", {100, 100}, values);
  const Bytes bytes = builder.build();
  const Gguf in_memory = Gguf::parse(bytes, "memory");
  const Gguf mapped = Gguf::open(folder.write("mapped.gguf", bytes));
  CHECK(mapped.name() == folder.path("mapped.gguf"));
  for (int repetition = 0; repetition < 2; ++repetition) {
    for (const auto& [name, info] : in_memory.tensors()) {
      CAPTURE(repetition, name);
      CHECK(tests::compare_bits(read_all(mapped, name), read_all(in_memory, name)).empty());
    }
  }
  CHECK(tests::compare_bits(read_all(mapped, "large"), values).empty());
}

TEST_CASE("a file cut short at any byte is refused", "[gguf]") {
  const Bytes bytes = tests::small_gguf().build();
  REQUIRE(parse_error(bytes).empty());
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    // A copy of exactly this size, so that a memory checker sees a read past its end.
    const std::string message = parse_error(Bytes(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size)));
    INFO("cut to " << size << " bytes: " << message);
    const bool refused = contains(message, size < 4 ? "not a GGUF file" : "the file is cut short or damaged");
    REQUIRE(refused);
  }
}

TEST_CASE("absurd counts and lengths are refused before anything is allocated", "[gguf]") {
  const std::uint64_t many = GENERATE(std::uint64_t{1} << 20U, std::uint64_t{1} << 40U, std::uint64_t{1} << 61U,
                                      std::uint64_t{1} << 63U, ~std::uint64_t{0});
  CAPTURE(many);
  GgufBuilder builder = tests::small_gguf();

  SECTION("metadata pairs") {
    builder.num_pairs = many;
    CHECK(contains(parse_error(builder), "the header says there are " + std::to_string(many) + " metadata pairs"));
  }
  SECTION("tensors") {
    builder.num_tensors = many;
    CHECK(contains(parse_error(builder), "the header says there are " + std::to_string(many) + " tensors"));
  }
  SECTION("array elements") {
    for (const std::uint32_t type : {0U, 1U, 2U, 3U, 4U, 5U, 6U, 7U, 8U, 10U, 11U, 12U}) {
      CAPTURE(type);
      Bytes payload;
      append(payload, type);
      append(payload, many);
      GgufBuilder array = tests::small_gguf();
      array.add_raw("many", tests::kGgufArray, payload);
      CHECK(contains(parse_error(array),
                     "metadata key \"many\" says there are " + std::to_string(many) + " array elements"));
    }
  }
  SECTION("bytes of a string") {
    Bytes payload;
    append(payload, many);
    builder.add_raw("long", tests::kGgufString, payload);
    CHECK(contains(parse_error(builder), "metadata key \"long\" needs " + std::to_string(many) + " bytes"));
  }
  SECTION("bytes of a string in an array") {
    Bytes payload;
    append(payload, std::uint32_t{tests::kGgufString});
    append(payload, std::uint64_t{1});
    append(payload, many);
    builder.add_raw("long", tests::kGgufArray, payload);
    CHECK(contains(parse_error(builder), "metadata key \"long\" needs " + std::to_string(many) + " bytes"));
  }
  SECTION("bytes of a key") {
    Bytes bytes = GgufBuilder().add("key", std::uint64_t{0}).build();
    std::memcpy(bytes.data() + 24, &many, sizeof(many));  // the first key's length
    CHECK(contains(parse_error(bytes), "the key of metadata pair 0 needs " + std::to_string(many) + " bytes"));
  }
  SECTION("bytes of a tensor's name") {
    Bytes bytes = GgufBuilder().add_tensor("weight", {1}, {0.0F}).build();
    std::memcpy(bytes.data() + 24, &many, sizeof(many));
    CHECK(contains(parse_error(bytes), "the name of tensor 0 needs " + std::to_string(many) + " bytes"));
  }
}

TEST_CASE("an array longer than any real one is refused even if the file holds it", "[gguf]") {
  constexpr std::uint64_t kTooMany = (std::uint64_t{1} << 24U) + 1;
  Bytes payload;
  append(payload, std::uint32_t{tests::kGgufUint8});
  append(payload, kTooMany);
  payload.resize(payload.size() + kTooMany);
  CHECK(contains(parse_error(GgufBuilder().add_raw("many", tests::kGgufArray, payload)),
                 "metadata key \"many\" has 16777217 array elements, and at most 16777216 are supported"));
}

TEST_CASE("a header that leaves less than its own counts is refused", "[gguf]") {
  GgufBuilder builder;
  builder.add("key", std::uint8_t{1});  // 8 + 3 + 4 + 1 bytes
  CHECK(parse_error(builder).empty());
  builder.num_pairs = 2;
  CHECK(contains(parse_error(builder), "says there are 2 metadata pairs, and only 16 bytes are left"));
}

TEST_CASE("metadata of unknown or unsupported types is refused", "[gguf]") {
  for (const std::uint32_t type : {13U, 100U, 0xFFFFFFFFU}) {
    const std::string expected = "metadata key \"odd\" has the unknown value type " + std::to_string(type);
    CHECK(parse_error(GgufBuilder().add_raw("odd", type, Bytes(16))) == expected);
    Bytes payload;
    append(payload, type);
    append(payload, std::uint64_t{1});
    CHECK(parse_error(GgufBuilder().add_raw("odd", tests::kGgufArray, payload)) == expected);
  }
  Bytes nested;
  append(nested, std::uint32_t{tests::kGgufArray});
  append(nested, std::uint64_t{1});
  append(nested, std::uint32_t{tests::kGgufUint8});
  append(nested, std::uint64_t{0});
  CHECK(parse_error(GgufBuilder().add_raw("odd", tests::kGgufArray, nested)) ==
        "metadata key \"odd\" is an array of arrays, which is not supported");
}

TEST_CASE("bools other than 0 and 1 and integers beyond 63 bits are refused", "[gguf]") {
  for (const int value : {2, 128, 255}) {
    const std::string expected =
        "metadata key \"odd\" is a bool of value " + std::to_string(value) + ", and only 0 and 1 are allowed";
    Bytes payload;
    append(payload, static_cast<std::uint8_t>(value));
    CHECK(parse_error(GgufBuilder().add_raw("odd", tests::kGgufBool, payload)) == expected);
    Bytes array;
    append(array, std::uint32_t{tests::kGgufBool});
    append(array, std::uint64_t{2});
    append(array, std::uint8_t{1});
    append(array, static_cast<std::uint8_t>(value));
    CHECK(parse_error(GgufBuilder().add_raw("odd", tests::kGgufArray, array)) == expected);
  }
  constexpr std::uint64_t kLargest = std::numeric_limits<std::int64_t>::max();
  CHECK(parse_error(GgufBuilder().add("large", kLargest)).empty());
  const std::string expected =
      "metadata key \"large\" holds the integer 9223372036854775808, which does not fit in 63 bits";
  CHECK(parse_error(GgufBuilder().add("large", kLargest + 1)) == expected);
  CHECK(parse_error(GgufBuilder().add_array("large", std::vector<std::uint64_t>{1, kLargest + 1})) == expected);
}

TEST_CASE("keys that are empty, too long or repeated are refused", "[gguf]") {
  CHECK(parse_error(GgufBuilder().add("", "text")) ==
        "the key of metadata pair 0 has 0 bytes, and 1 to 65535 are allowed");
  CHECK(parse_error(GgufBuilder().add(std::string(65535, 'k'), std::uint8_t{1})).empty());
  CHECK(parse_error(GgufBuilder().add("a", true).add(std::string(65536, 'k'), std::uint8_t{1})) ==
        "the key of metadata pair 1 has 65536 bytes, and 1 to 65535 are allowed");
  CHECK(parse_error(GgufBuilder().add("twice", std::uint8_t{1}).add("other", true).add("twice", "text")) ==
        "metadata key \"twice\" appears twice");
  // A hostile key must neither break the line nor flood it.
  const std::string message = parse_error(GgufBuilder().add_raw("line\nbreak" + std::string(9999, 'k'), 99, Bytes(8)));
  CHECK(contains(message, "unknown value type 99"));
  CHECK(message.size() < 200);
}

TEST_CASE("a wrong general.alignment is refused", "[gguf]") {
  for (const std::uint32_t alignment : {0U, 1U, 4U, 24U, 33U, 131072U, 0x80000000U, 0xFFFFFFFFU}) {
    CHECK(parse_error(GgufBuilder().add("general.alignment", alignment)) ==
          "general.alignment is " + std::to_string(alignment) + ", and it must be a power of two from 8 to 65536");
  }
  CHECK(parse_error(GgufBuilder().add("general.alignment", std::uint64_t{32})) == "general.alignment must be a uint32");
  CHECK(parse_error(GgufBuilder().add("general.alignment", "32")) == "general.alignment must be a uint32");
  CHECK(parse_error(GgufBuilder().add_array("general.alignment", std::vector<std::uint32_t>{32})) ==
        "general.alignment must be a uint32");
}

TEST_CASE("tensors of other types are refused by the type's name", "[gguf]") {
  const auto type_error = [](std::uint32_t type) {
    GgufBuilder builder;
    builder.tensors.push_back({"blk.0.attn_q.weight", {256}, type, Bytes(1024), {}});
    return parse_error(builder);
  };
  const std::string supported =
      ", which is not supported (supported: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, "
      "Q6_K, "
      "IQ4_NL)";
  // The numbers and names of ggml's enum ggml_type.
  const std::vector<std::pair<std::uint32_t, std::string>> others = {
      {9, "Q8_1"},   {15, "Q8_K"},   {16, "IQ2_XXS"}, {17, "IQ2_XS"}, {18, "IQ3_XXS"}, {19, "IQ1_S"}, {21, "IQ3_S"},
      {22, "IQ2_S"}, {23, "IQ4_XS"}, {24, "I8"},      {25, "I16"},    {26, "I32"},     {27, "I64"},   {28, "F64"},
      {29, "IQ1_M"}, {34, "TQ1_0"},  {35, "TQ2_0"},   {39, "MXFP4"},  {40, "NVFP4"},   {41, "Q1_0"}};
  const auto refused_as = [&](std::string name) {
    name.insert(0, "tensor \"blk.0.attn_q.weight\" is ");
    name.append(supported);
    return name;
  };
  for (const auto& [type, name] : others) {
    CHECK(type_error(type) == refused_as(name));
  }
  for (const std::uint32_t type : {4U, 5U, 31U, 33U, 38U, 42U, 0xFFFFFFFFU}) {
    CHECK(type_error(type) == refused_as("of unknown type " + std::to_string(type)));
  }
  for (const std::uint32_t type : {0U, 1U, 2U, 3U, 6U, 7U, 8U, 10U, 11U, 12U, 13U, 14U, 20U, 30U}) {
    CHECK(type_error(type).empty());
  }
}

TEST_CASE("wrong dimensions are refused", "[gguf]") {
  constexpr std::uint64_t kTwoTo31 = std::uint64_t{1} << 31U;
  CHECK(parse_error(with_tensor({1, 1, 1, 1}, TensorType::F32, 4)).empty());
  CHECK(parse_error(with_tensor({}, TensorType::F32, 4)) ==
        "tensor \"weight\" has 0 dimensions, and 1 to 4 are allowed");
  CHECK(parse_error(with_tensor({1, 1, 1, 1, 1}, TensorType::F32, 4)) ==
        "tensor \"weight\" has 5 dimensions, and 1 to 4 are allowed");
  CHECK(parse_error(with_tensor({0}, TensorType::F32, 0)) == "tensor \"weight\" has a dimension of size 0");
  CHECK(parse_error(with_tensor({4, 0, 2}, TensorType::F32, 0)) == "tensor \"weight\" has a dimension of size 0");
  CHECK(contains(parse_error(with_tensor({kTwoTo31 * kTwoTo31 * 2}, TensorType::F32, 4)), "does not fit in 63 bits"));
  const std::string too_many = "tensor \"weight\" has more elements than 60 bits can count";
  CHECK(parse_error(with_tensor({kTwoTo31 * kTwoTo31}, TensorType::F32, 4)) == too_many);
  CHECK(parse_error(with_tensor({kTwoTo31, kTwoTo31}, TensorType::F32, 4)) == too_many);
  CHECK(parse_error(with_tensor({kTwoTo31, kTwoTo31, 4}, TensorType::F32, 4)) == too_many);  // 2^64 wraps to 0
  CHECK(parse_error(with_tensor({3, kTwoTo31, kTwoTo31, 2}, TensorType::F32, 4)) == too_many);
  // Bytes that no file has, but 64 bits can count.
  CHECK(
      contains(parse_error(with_tensor({kTwoTo31, kTwoTo31 / 8}, TensorType::F32, 4)),
               "tensor \"weight\" needs 2305843009213693952 bytes at offset 0 of the tensor data, which has 4 bytes"));
}

TEST_CASE("rows must be whole blocks", "[gguf]") {
  CHECK(parse_error(with_tensor({33}, TensorType::Q8_0, 68)) ==
        "tensor \"weight\" has rows of 33 elements, which is not a whole number of Q8_0 blocks of 32");
  // 32 elements in all, but a block may not span two rows.
  CHECK(parse_error(with_tensor({16, 2}, TensorType::Q4_1, 20)) ==
        "tensor \"weight\" has rows of 16 elements, which is not a whole number of Q4_1 blocks of 32");
  CHECK(parse_error(with_tensor({128, 2}, TensorType::Q6_K, 210)) ==
        "tensor \"weight\" has rows of 128 elements, which is not a whole number of Q6_K blocks of 256");
}

TEST_CASE("tensor data must be aligned, inside the file, and not overlap with another tensor's", "[gguf]") {
  GgufBuilder builder;
  builder.add_tensor("a", {4}, {1, 2, 3, 4}).add_tensor("b", {16}, std::vector<float>(16));
  REQUIRE(parse_error(builder).empty());
  std::optional<std::uint64_t>& offset = builder.tensors[1].offset;

  offset = 16;
  CHECK(parse_error(builder) == "tensor \"b\" starts at offset 16, which is not a multiple of the alignment 32");
  offset = 31;
  CHECK(parse_error(builder) == "tensor \"b\" starts at offset 31, which is not a multiple of the alignment 32");
  offset = 0;
  CHECK(parse_error(builder) == "the data of tensors \"a\" and \"b\" overlap");
  // The last of these and the size add up to 32 in 64 bits, which would seem to lie inside.
  for (const std::uint64_t beyond : {std::uint64_t{64}, std::uint64_t{1} << 40U, ~std::uint64_t{31}}) {
    offset = beyond;
    CHECK(contains(parse_error(builder), "tensor \"b\" needs 64 bytes at offset " + std::to_string(beyond) +
                                             " of the tensor data, which has 96 bytes"));
  }
  offset = 32;
  builder.tensors[1].dimensions = {17};  // one element more than the file has
  CHECK(contains(parse_error(builder), "tensor \"b\" needs 68 bytes at offset 32 of the tensor data, which has 96"));
  builder.tensors[1].dimensions = {16};
  builder.tensors[0].dimensions = {9};
  CHECK(parse_error(builder) == "the data of tensors \"a\" and \"b\" overlap");
}

TEST_CASE("tensor names that are empty, too long or repeated are refused", "[gguf]") {
  const auto name_error = [](const std::string& name) {
    return parse_error(GgufBuilder().add_tensor("first", {1}, {0.0F}).add_tensor(name, {1}, {0.0F}));
  };
  CHECK(name_error(std::string(64, 'n')).empty());
  CHECK(name_error("") == "the name of tensor 1 has 0 bytes, and 1 to 64 are allowed");
  CHECK(name_error(std::string(65, 'n')) == "the name of tensor 1 has 65 bytes, and 1 to 64 are allowed");
  CHECK(name_error("first") == "tensor \"first\" appears twice");
}

TEST_CASE("block formats", "[dequantize]") {
  const auto is = [](TensorType type, int elements, int bytes, const std::string& name) {
    const common::BlockFormat format = common::block_format(type);
    return format.elements == elements && format.bytes == bytes && common::type_name(type) == name;
  };
  CHECK(is(TensorType::F32, 1, 4, "F32"));
  CHECK(is(TensorType::F16, 1, 2, "F16"));
  CHECK(is(TensorType::BF16, 1, 2, "BF16"));
  CHECK(is(TensorType::Q8_0, 32, 34, "Q8_0"));
  CHECK(is(TensorType::Q4_0, 32, 18, "Q4_0"));
  CHECK(is(TensorType::Q4_1, 32, 20, "Q4_1"));
  CHECK(is(TensorType::Q5_0, 32, 22, "Q5_0"));
  CHECK(is(TensorType::Q5_1, 32, 24, "Q5_1"));
  CHECK(is(TensorType::Q2_K, 256, 84, "Q2_K"));
  CHECK(is(TensorType::Q3_K, 256, 110, "Q3_K"));
  CHECK(is(TensorType::Q4_K, 256, 144, "Q4_K"));
  CHECK(is(TensorType::Q5_K, 256, 176, "Q5_K"));
  CHECK(is(TensorType::Q6_K, 256, 210, "Q6_K"));
  CHECK(is(TensorType::IQ4_NL, 32, 18, "IQ4_NL"));
  CHECK_THROWS_AS(common::block_format(static_cast<TensorType>(9)), common::CheckError);
  CHECK_THROWS_AS(common::type_name(static_cast<TensorType>(9)), common::CheckError);
}

TEST_CASE("dequantize takes whole blocks and exactly their bytes", "[dequantize]") {
  std::vector<float> out(64);
  CHECK_NOTHROW(common::dequantize(TensorType::Q8_0, Bytes(68), out));
  CHECK_THROWS_AS(common::dequantize(TensorType::Q8_0, Bytes(67), out), common::CheckError);
  CHECK_THROWS_AS(common::dequantize(TensorType::Q8_0, Bytes(102), out), common::CheckError);
  CHECK_THROWS_AS(common::dequantize(TensorType::Q6_K, Bytes(210), out), common::CheckError);
  CHECK_NOTHROW(common::dequantize(TensorType::Q8_0, Bytes(), std::span<float>()));
}

TEST_CASE("all float16 values", "[dequantize]") {
  Bytes data;
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    append(data, static_cast<std::uint16_t>(bits));
  }
  const std::vector<float> values = dequantized(TensorType::F16, data, 65536);
  int num_wrong = 0;
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const auto expected = static_cast<float>(half_value(bits));
    const bool same = std::isnan(expected)
                          ? std::isnan(values[bits])
                          : std::bit_cast<std::uint32_t>(values[bits]) == std::bit_cast<std::uint32_t>(expected);
    num_wrong += same ? 0 : 1;
  }
  CHECK(num_wrong == 0);
  CHECK(values[0x3C00] == 1.0F);
  CHECK(values[0x7BFF] == 65504.0F);               // the largest
  CHECK(values[0x0001] == std::ldexp(1.0F, -24));  // the smallest above zero
  CHECK(values[0x0400] == std::ldexp(1.0F, -14));  // the smallest normal one
  CHECK(values[0xFC00] == -std::numeric_limits<float>::infinity());
  CHECK(std::signbit(values[0x8000]));
}

TEST_CASE("all bfloat16 values", "[dequantize]") {
  Bytes data;
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    append(data, static_cast<std::uint16_t>(bits));
  }
  const std::vector<float> values = dequantized(TensorType::BF16, data, 65536);
  int num_wrong = 0;
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const bool is_nan = (bits & 0x7FFFU) > 0x7F80U;
    const bool same = is_nan ? std::isnan(values[bits]) : std::bit_cast<std::uint32_t>(values[bits]) == bits << 16U;
    num_wrong += same ? 0 : 1;
  }
  CHECK(num_wrong == 0);
  CHECK(values[0x3F80] == 1.0F);
  CHECK(values[0xC040] == -3.0F);
}

TEST_CASE("16-bit values of any number", "[dequantize]") {
  for (std::size_t size = 1; size < 200; ++size) {
    Bytes data;
    std::vector<float> expected;
    for (std::size_t i = 0; i < size; ++i) {
      append(data, static_cast<std::uint16_t>(0x3C00 + i));  // 1 + i / 1024
      expected.push_back(1.0F + static_cast<float>(i) / 1024.0F);
    }
    CAPTURE(size);
    CHECK(tests::compare_bits(dequantized(TensorType::F16, data, size), expected).empty());
  }
}

TEST_CASE("F32 is copied", "[dequantize]") {
  const std::vector<float> values = {1.0F, -0.0F, 1e-40F, std::numeric_limits<float>::max()};
  Bytes data;
  for (const float value : values) {
    append(data, value);
  }
  CHECK(tests::compare_bits(dequantized(TensorType::F32, data, 4), values).empty());
}

TEST_CASE("Q8_0 by hand", "[dequantize]") {
  Bytes block;
  append(block, kHalfQuarter);
  for (int i = 0; i < 32; ++i) {
    append(block, static_cast<std::int8_t>(i == 31 ? -128 : i * 4));
  }
  const std::vector<float> values = dequantized(TensorType::Q8_0, block, 32);
  CHECK(values[0] == 0.0F);
  CHECK(values[1] == 1.0F);
  CHECK(values[30] == 30.0F);
  CHECK(values[31] == -32.0F);
}

TEST_CASE("Q4_0 by hand", "[dequantize]") {
  Bytes block;
  append(block, kHalfMinusTwo);
  for (int i = 0; i < 16; ++i) {
    append(block, static_cast<std::uint8_t>(i | (15 - i) << 4));  // low nibbles rise, high nibbles fall
  }
  const std::vector<float> values = dequantized(TensorType::Q4_0, block, 32);
  CHECK(values[0] == 16.0F);  // -2 * (0 - 8)
  CHECK(values[8] == 0.0F);
  CHECK(values[15] == -14.0F);  // -2 * (15 - 8)
  CHECK(values[16] == -14.0F);
  CHECK(values[31] == 16.0F);
}

TEST_CASE("Q4_1 by hand", "[dequantize]") {
  Bytes block;
  append(block, kHalfQuarter);
  append(block, kHalfMinusTwo);
  for (int i = 0; i < 16; ++i) {
    append(block, static_cast<std::uint8_t>(i | (15 - i) << 4));
  }
  const std::vector<float> values = dequantized(TensorType::Q4_1, block, 32);
  CHECK(values[0] == -2.0F);
  CHECK(values[4] == -1.0F);   // 0.25 * 4 - 2
  CHECK(values[15] == 1.75F);  // 0.25 * 15 - 2
  CHECK(values[16] == 1.75F);
  CHECK(values[31] == -2.0F);
}

TEST_CASE("Q6_K by hand", "[dequantize]") {
  Bytes block(192);
  block[70] = std::byte{0x5A};            // low bits of weights 134 (A) and 198 (5): second half, byte 6
  block[128 + 32 + 6] = std::byte{0xE4};  // high bits 0, 1, 2, 3 of weights 134, 166, 198 and 230
  for (int group = 0; group < 16; ++group) {
    append(block, static_cast<std::int8_t>(group == 15 ? -1 : group + 1));
  }
  append(block, kHalfOne);
  const std::vector<float> values = dequantized(TensorType::Q6_K, block, 256);
  CHECK(values[0] == -32.0F);
  CHECK(values[15] == -32.0F);
  CHECK(values[16] == -64.0F);  // the second group: scale 2
  CHECK(values[127] == -32.0F * 8);
  CHECK(values[134] == 9.0F * (10 - 32));       // group 8, q = 10 + 0 * 16
  CHECK(values[166] == 11.0F * (0 + 16 - 32));  // group 10, q = 0 + 1 * 16
  CHECK(values[198] == 13.0F * (5 + 32 - 32));  // group 12, q = 5 + 2 * 16
  CHECK(values[230] == 15.0F * (0 + 48 - 32));  // group 14, q = 0 + 3 * 16
  CHECK(values[255] == 32.0F);                  // group 15, scale -1
}

TEST_CASE("the bundled model's metadata", "[model]") {
  const Gguf file = Gguf::open(kModelPath);
  CHECK(file.get_string("general.architecture") == "llama");
  CHECK(file.get_string("general.name") == "Tales 5M");
  CHECK(file.get_string("general.license") == "cc0-1.0");
  CHECK(file.get_int("llama.vocab_size") == 2048);
  CHECK(file.get_int("llama.context_length") == 1024);
  CHECK(file.get_int("llama.embedding_length") == 256);
  CHECK(file.get_int("llama.block_count") == 6);
  CHECK(file.get_int("llama.feed_forward_length") == 768);
  CHECK(file.get_int("llama.rope.dimension_count") == 32);
  CHECK(file.get_float("llama.rope.freq_base") == 10000.0);
  CHECK(file.get_int("llama.attention.head_count") == 8);
  CHECK(file.get_int("llama.attention.head_count_kv") == 2);
  CHECK(file.get_float("llama.attention.layer_norm_rms_epsilon") == static_cast<double>(1e-5F));
  CHECK(file.get_string("tokenizer.ggml.model") == "gpt2");
  CHECK(file.get_string("tokenizer.ggml.pre") == "smollm");
  CHECK(file.get_int("tokenizer.ggml.bos_token_id") == 0);
  CHECK(file.get_int("tokenizer.ggml.eos_token_id") == 0);
  CHECK(file.get_bool("tokenizer.ggml.add_bos_token", false));
  CHECK_FALSE(file.get_bool("tokenizer.ggml.add_eos_token", true));

  const std::vector<std::string>& tokens = file.get_strings("tokenizer.ggml.tokens");
  REQUIRE(tokens.size() == 2048);
  CHECK(tokens[0] == "<|endoftext|>");
  CHECK(tokens[1] == "!");
  CHECK(tokens[257] == "\xC4\xA0t");  // a space and "t", the first merge
  const std::vector<std::string>& merges = file.get_strings("tokenizer.ggml.merges");
  REQUIRE(merges.size() == 1791);
  CHECK(merges[0] == "\xC4\xA0 t");
  std::vector<std::int64_t> token_types(2048, 1);
  token_types[0] = 3;
  CHECK(file.get_ints("tokenizer.ggml.token_type") == token_types);
}

TEST_CASE("the bundled model's tensors", "[model]") {
  const Gguf file = Gguf::open(kModelPath);
  CHECK(file.tensors().size() == 56);
  CHECK_FALSE(file.has_tensor("output.weight"));
  int num_f32 = 0;
  int num_q8_0 = 0;
  std::int64_t num_weights = 0;
  for (const auto& [name, info] : file.tensors()) {
    num_f32 += info.type == TensorType::F32 ? 1 : 0;
    num_q8_0 += info.type == TensorType::Q8_0 ? 1 : 0;
    num_weights += info.num_elements;
  }
  CHECK(num_f32 == 13);
  CHECK(num_q8_0 == 43);
  CHECK(num_weights == 5049600);
  using Shape = std::vector<std::int64_t>;
  CHECK(file.tensors().at("token_embd.weight").shape == Shape{2048, 256});
  CHECK(file.tensors().at("blk.5.attn_k.weight").shape == Shape{64, 256});
  CHECK(file.tensors().at("blk.5.ffn_down.weight").shape == Shape{256, 768});
  CHECK(file.tensors().at("output_norm.weight").shape == Shape{256});
}

// The figures were computed with the Python package "gguf" (gguf.dequantize, https://pypi.org/project/gguf/).
TEST_CASE("the bundled model's weights equal those that another program reads", "[model]") {
  const Gguf file = Gguf::open(kModelPath);
  struct Expected {
    std::string name;
    float first;
    float last;
    double sum;  // in double
  };
  const std::array<Expected, 4> all_expected = {{
      {"token_embd.weight", 0.0194549560546875F, 0.043155670166015625F, 835.7782564163208},
      {"blk.0.attn_k.weight", -0.1526927947998047F, -0.1305713653564453F, 53.925312995910645},
      {"blk.5.ffn_down.weight", -0.11606597900390625F, -0.04156684875488281F, -14.206454277038574},
      {"output_norm.weight", 2.1484375F, 2.16015625F, 556.84716796875},
  }};
  for (const Expected& expected : all_expected) {
    CAPTURE(expected.name);
    const std::vector<float> values = read_all(file, expected.name);
    double sum = 0.0;
    for (const float value : values) {
      sum += static_cast<double>(value);
    }
    CHECK(values.front() == expected.first);
    CHECK(values.back() == expected.last);
    // A weight is 8 bits of a float16, so all lie on a grid of 2^-24 or coarser and the sum is exact in any order.
    CHECK(sum == expected.sum);
  }
}
