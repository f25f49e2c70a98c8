// Vocabularies of different models: the rules that cut text into pieces, and SentencePiece. The golden tokens are
// llama.cpp's, for the bundled model's vocabulary under each rule (tests/common/peer_cases.py).
#include <array>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/base/check.h"
#include "common/base/utf8.h"
#include "common/math/sampling.h"
#include "common/model/default_model.h"
#include "common/model/gguf.h"
#include "common/model/pieces.h"
#include "common/model/tokenizer.h"
#include "common/model/unicode.h"
#include "tests/common/spellings.h"
#include "tests/support/catch.h"
#include "tests/support/gguf_builder.h"
#include "tests/support/messages.h"
#include "tests/support/paths.h"

using common::Gguf;
using common::PieceRule;
using common::Random;
using common::Token;
using common::Tokenizer;
using tests::contains;
using tests::error_of;
using tests::source_path;

namespace {

constexpr std::string_view kBlank = "\xE2\x96\x81";
constexpr int kNormal = 1;
constexpr int kUnknown = 2;
constexpr int kControl = 3;
constexpr int kUserDefined = 4;
constexpr int kByte = 6;

const std::vector<std::string>& rule_names() {
  static const std::vector<std::string> names = {"gpt-2", "smollm", "llama-bpe", "qwen2", "default"};
  return names;
}

const Gguf& bundled_file() {
  static const Gguf file = Gguf::parse(common::default_model(), "the bundled model");
  return file;
}

// The bundled vocabulary with another rule.
Tokenizer byte_pairs(const std::string& rule) {
  tests::GgufBuilder builder;
  builder.add("tokenizer.ggml.model", "gpt2").add("tokenizer.ggml.pre", rule);
  builder.add_array("tokenizer.ggml.tokens", bundled_file().get_strings("tokenizer.ggml.tokens"));
  builder.add_array("tokenizer.ggml.token_type", bundled_file().get_ints("tokenizer.ggml.token_type"));
  builder.add_array("tokenizer.ggml.merges", bundled_file().get_strings("tokenizer.ggml.merges"));
  const tests::Bytes bytes = builder.build();
  return Tokenizer(Gguf::parse(bytes, "tales.gguf"));
}

// A SentencePiece vocabulary.
struct Pieces {
  std::vector<std::string> tokens = {"<unk>", "<s>", "</s>"};
  std::vector<std::int32_t> types = {kUnknown, kControl, kControl};
  std::vector<float> scores = {0.0F, 0.0F, 0.0F};
  std::map<std::string, bool> flags;  // in the metadata, by the end of their keys

  explicit Pieces(bool with_bytes = true) {
    for (int byte = 0; with_bytes && byte < 256; ++byte) {
      constexpr std::string_view kDigits = "0123456789ABCDEF";
      const std::array<char, 2> digits = {kDigits[static_cast<std::size_t>(byte / 16)],
                                          kDigits[static_cast<std::size_t>(byte % 16)]};
      add("<0x" + std::string(digits.begin(), digits.end()) + ">", 0.0F, kByte);
    }
  }

  Token add(const std::string& spelling, float score, int type = kNormal) {
    tokens.push_back(spelling);
    types.push_back(type);
    scores.push_back(score);
    return static_cast<Token>(tokens.size() - 1);
  }

  Tokenizer tokenizer() const {
    tests::GgufBuilder builder;
    builder.add("tokenizer.ggml.model", "llama").add("tokenizer.ggml.bos_token_id", 1);
    builder.add("tokenizer.ggml.eos_token_id", 2);
    builder.add_array("tokenizer.ggml.tokens", tokens).add_array("tokenizer.ggml.scores", scores);
    builder.add_array("tokenizer.ggml.token_type", types);
    for (const auto& [key, value] : flags) {
      builder.add("tokenizer.ggml." + key, value);
    }
    const tests::Bytes bytes = builder.build();
    return Tokenizer(Gguf::parse(bytes, "pieces.gguf"));
  }

  std::string refusal() const {
    return error_of([this] { tokenizer(); });
  }

  std::string show(std::string_view text, bool parse_special = false) const {
    return tests::spellings_of(tokenizer(), tokens, text, parse_special);
  }
};

// The text tokens of the bundled model, in order: a later merge has a lower score.
Tokenizer sentence_pieces() {
  const Tokenizer bundled(bundled_file());
  Pieces pieces;
  for (Token token = 1; token < bundled.vocab_size(); ++token) {
    const std::string text = bundled.decode(std::vector<Token>{token});
    const bool is_text = error_of([&] { common::check_utf8(text); }).empty();
    const bool is_plain = text.find('\n') == std::string::npos && static_cast<unsigned char>(text[0]) >= 32;
    if (!is_text || !is_plain || text == "\x7F") {
      continue;
    }
    std::string spelling;
    for (const char character : text) {
      spelling += character == ' ' ? std::string(kBlank) : std::string(1, character);
    }
    pieces.add(spelling, 259.0F - static_cast<float>(pieces.tokens.size()));
  }
  return pieces.tokenizer();
}

void append_utf8(char32_t code_point, std::string& out) {
  const auto byte = [&out](char32_t value) { out.push_back(static_cast<char>(static_cast<unsigned char>(value))); };
  if (code_point < 0x80) {
    byte(code_point);
  } else if (code_point < 0x800) {
    byte(0xC0U | code_point >> 6U);
    byte(0x80U | (code_point & 0x3FU));
  } else if (code_point < 0x10000) {
    byte(0xE0U | code_point >> 12U);
    byte(0x80U | (code_point >> 6U & 0x3FU));
    byte(0x80U | (code_point & 0x3FU));
  } else {
    byte(0xF0U | code_point >> 18U);
    byte(0x80U | (code_point >> 12U & 0x3FU));
    byte(0x80U | (code_point >> 6U & 0x3FU));
    byte(0x80U | (code_point & 0x3FU));
  }
}

// Characters of all kinds that the rules distinguish, and some of any plane. Never U+2581, which is a blank to
// SentencePiece.
std::string random_text(Random& random) {
  constexpr std::u32string_view kKinds = U"  \n\r\tabcXYZ019'sStTlL.,!$+`中文éЖ½²٣😀\u00A0\u3000\u0301<|>_";
  std::string text;
  for (std::uint64_t length = random.below(50); length > 0; --length) {
    char32_t code_point = kKinds[random.below(kKinds.size())];
    if (random.below(8) == 0) {
      code_point = static_cast<char32_t>(random.below(random.below(2) == 0 ? 0x3000 : 0x110000));
    }
    const bool is_surrogate = code_point >= 0xD800 && code_point <= 0xDFFF;
    append_utf8(is_surrogate || code_point == 0x2581 ? U'x' : code_point, text);
  }
  return text;
}

std::string show_pieces(std::string_view text, const std::string& rule) {
  std::string shown;
  for (const std::string_view piece : common::cut_into_pieces(text, common::find_piece_rule(rule).value())) {
    shown += "[" + std::string(piece) + "]";
  }
  return shown;
}

}  // namespace

TEST_CASE("The bundled vocabulary's tokens equal llama.cpp's under every rule") {
  std::ifstream stream(source_path("tests/golden/golden_tokenizers.json"));
  REQUIRE(stream.is_open());
  const nlohmann::json golden = nlohmann::json::parse(stream);
  std::map<std::string, Tokenizer> tokenizers;
  for (const std::string& rule : rule_names()) {
    // llama.cpp does not compose Qwen's texts: it has the tokens of DeepSeek's models of the same rule.
    tokenizers.emplace(rule, byte_pairs(rule == "qwen2" ? "deepseek-r1-qwen" : rule));
  }
  tokenizers.emplace("sentencepiece", sentence_pieces());
  std::map<std::string, int> counts;
  for (const nlohmann::json& entry : golden.at("cases")) {
    const auto rule = entry.at("rule").get<std::string>();
    const auto text = entry.at("text").get<std::string>();
    CAPTURE(rule, text);
    CHECK(tokenizers.at(rule).encode(text, true) == entry.at("ids").get<std::vector<Token>>());
    ++counts[rule];
  }
  CHECK(counts.size() == 6);
  for (const auto& [rule, count] : counts) {
    CAPTURE(rule);
    CHECK(count >= 100);
  }
}

TEST_CASE("Any text is decoded to what was encoded, under every rule") {
  constexpr std::uint64_t kSeed = 3;
  CAPTURE(kSeed);
  Random random(kSeed);
  std::map<std::string, Tokenizer> tokenizers;
  for (const std::string& rule : rule_names()) {
    tokenizers.emplace(rule, byte_pairs(rule));
  }
  const Tokenizer pieces = sentence_pieces();
  for (int i = 0; i < 1500; ++i) {
    const std::string text = random_text(random);
    CAPTURE(i, text);
    for (const auto& [rule, tokenizer] : tokenizers) {
      CAPTURE(rule);
      const std::string expected = rule == "qwen2" ? common::composed(text) : text;
      REQUIRE(tokenizer.decode(tokenizer.encode(text)) == expected);
      REQUIRE(tokenizer.decode(tokenizer.encode(text, true), true) == expected);
      std::string joined;
      for (const std::string_view piece : common::cut_into_pieces(text, *common::find_piece_rule(rule))) {
        REQUIRE_FALSE(piece.empty());
        joined += piece;
      }
      REQUIRE(joined == text);
    }
    // SentencePiece puts a blank in front.
    REQUIRE(pieces.decode(pieces.encode(text)) == (text.empty() ? "" : " " + text));
    REQUIRE(pieces.decode_text(pieces.encode_prompt(text)) == text);
  }
}

TEST_CASE("Text is cut by the rule that the vocabulary names") {
  const auto expect = [](const std::string& text, const std::array<std::string, 5>& shown) {
    CAPTURE(text);
    for (std::size_t i = 0; i < shown.size(); ++i) {
      CAPTURE(rule_names()[i]);
      CHECK(show_pieces(text, rule_names()[i]) == shown[i]);
    }
  };
  //                       gpt-2             smollm                llama-bpe          qwen2                 default
  expect("a 1234", {"[a][ 1234]", "[a][ ][1][2][3][4]", "[a][ ][123][4]", "[a][ ][1][2][3][4]", "[a][ ][123][4]"});
  expect("x\t\tyes", {"[x][\t][\t][yes]", "[x][\t][\t][yes]", "[x][\t][\tyes]", "[x][\t][\tyes]", "[x][\t][\t][yes]"});
  expect("(it)", {"[(][it][)]", "[(][it][)]", "[(it][)]", "[(it][)]", "[(][it][)]"});
  expect("IT'S", {"[IT]['][S]", "[IT]['][S]", "[IT]['S]", "[IT]['S]", "[IT]['][S]"});
  expect("it'ſ", {"[it]['][ſ]", "[it]['][ſ]", "[it]['ſ]", "[it]['ſ]", "[it]['][ſ]"});  // a long s
  expect("it's", {"[it]['s]", "[it]['s]", "[it]['s]", "[it]['s]", "[it]['][s]"});
  expect("!\n\n x", {"[!][\n\n][ x]", "[!][\n\n][ x]", "[!\n\n][ x]", "[!\n\n][ x]", "[!][\n\n][ x]"});
  expect("a \n  b", {"[a][ \n ][ b]", "[a][ \n ][ b]", "[a][ \n][ ][ b]", "[a][ \n][ ][ b]", "[a][ \n ][ b]"});
  expect("a  ", {"[a][  ]", "[a][  ]", "[a][  ]", "[a][  ]", "[a][  ]"});
  expect("½12", {"[½12]", "[½][1][2]", "[½12]", "[½][1][2]", "[½12]"});
  expect(" $x", {"[ $][x]", "[ $][x]", "[ $][x]", "[ $][x]", "[ ][$][x]"});
  expect("", {"", "", "", "", ""});
  CHECK(common::find_piece_rule("llama3") == PieceRule::kLlama3);
  CHECK_FALSE(common::find_piece_rule("falcon").has_value());
}

TEST_CASE("A file that names no rule has the default one, and Llama 3's begin texts with BOS") {
  const auto with = [](const std::optional<std::string>& rule, const std::optional<bool>& add_bos) {
    tests::GgufBuilder builder;
    builder.add("tokenizer.ggml.model", "gpt2").add("tokenizer.ggml.bos_token_id", 0);
    builder.add_array("tokenizer.ggml.tokens", bundled_file().get_strings("tokenizer.ggml.tokens"));
    builder.add_array("tokenizer.ggml.token_type", bundled_file().get_ints("tokenizer.ggml.token_type"));
    builder.add_array("tokenizer.ggml.merges", bundled_file().get_strings("tokenizer.ggml.merges"));
    if (rule) {
      builder.add("tokenizer.ggml.pre", *rule);
    }
    if (add_bos) {
      builder.add("tokenizer.ggml.add_bos_token", *add_bos);
    }
    const tests::Bytes bytes = builder.build();
    return Tokenizer(Gguf::parse(bytes, "tales.gguf"));
  };
  CHECK(with({}, {}).encode("it's") == byte_pairs("default").encode("it's"));
  CHECK_FALSE(with({}, {}).add_bos());
  CHECK_FALSE(with("qwen2", {}).add_bos());
  CHECK(with("llama-bpe", {}).add_bos());
  CHECK_FALSE(with("llama-bpe", false).add_bos());
}

TEST_CASE("Llama 3's vocabulary has words that its merges do not make") {
  std::vector<std::string> tokens = bundled_file().get_strings("tokenizer.ggml.tokens");
  std::vector<std::int64_t> types = bundled_file().get_ints("tokenizer.ggml.token_type");
  tokens.emplace_back("qqqq");
  types.push_back(kNormal);
  const auto encode = [&](const std::string& rule) {
    tests::GgufBuilder builder;
    builder.add("tokenizer.ggml.model", "gpt2").add("tokenizer.ggml.pre", rule);
    builder.add_array("tokenizer.ggml.tokens", tokens).add_array("tokenizer.ggml.token_type", types);
    builder.add_array("tokenizer.ggml.merges", bundled_file().get_strings("tokenizer.ggml.merges"));
    const tests::Bytes bytes = builder.build();
    return Tokenizer(Gguf::parse(bytes, "tales.gguf")).encode("qqqq");
  };
  CHECK(encode("llama-bpe") == std::vector<Token>{2048});
  CHECK(encode("qwen2").size() == 4);
}

TEST_CASE("Qwen's texts are composed first, and those of other models are left as they are") {
  for (const std::string& rule : rule_names()) {
    const Tokenizer tokenizer = byte_pairs(rule);
    CAPTURE(rule);
    const auto survives = [&](const std::string& text) { return tokenizer.decode(tokenizer.encode(text)) == text; };
    CHECK(survives("\u00e9 \uac00"));
    CHECK(survives("e\u0301 \u1100\u1161") == (rule != "qwen2"));
    CHECK((tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")) == (rule == "qwen2"));
  }
}

TEST_CASE("SentencePiece merges by the highest score, and spells missing characters in bytes") {
  Pieces pieces;
  pieces.flags["add_space_prefix"] = false;
  for (const std::string character : {"a", "b", "c"}) {
    pieces.add(character, -10.0F);
  }
  pieces.add(std::string(kBlank), -10.0F);
  pieces.add("ab", -2.0F);
  pieces.add("bc", -1.0F);
  pieces.add("aa", -3.0F);
  CHECK(pieces.show("abc") == "a|bc");
  CHECK(pieces.show("ab") == "ab");
  CHECK(pieces.show("aaa") == "aa|a");  // the leftmost of equals
  CHECK(pieces.show("aé") == "a|<0xC3>|<0xA9>");
  CHECK(pieces.show("\n") == "<0x0A>");
  CHECK(pieces.show("a b") == "a|" + std::string(kBlank) + "|b");

  SECTION("A blank stands in front of a text, and of what follows a special token") {
    pieces.flags.clear();
    CHECK(pieces.show("a") == std::string(kBlank) + "|a");
    CHECK(pieces.show("").empty());
    CHECK(pieces.show("<s>a</s>", true) == "<s>|" + std::string(kBlank) + "|a|</s>");
    CHECK(pieces.tokenizer().decode(pieces.tokenizer().encode("a\n")) == " a\n");
  }
  SECTION("Text begins with BOS unless the file says otherwise") {
    CHECK(pieces.tokenizer().encode_prompt("a").front() == 1);
    pieces.flags["add_bos_token"] = false;
    CHECK_FALSE(pieces.tokenizer().add_bos());
  }
  SECTION("User-defined tokens are whole in any text, control tokens on request") {
    pieces.add("<tool>", 0.0F, kUserDefined);
    CHECK(pieces.show("a<tool>b") == "a|<tool>|b");
    CHECK(pieces.show("<s>").find("<s>") == std::string::npos);
    CHECK(pieces.tokenizer().decode(pieces.tokenizer().encode("a<tool>b")) == "a<tool>b");
  }
  SECTION("The character for blanks is a blank") {
    CHECK(pieces.show("a" + std::string(kBlank) + "b") == pieces.show("a b"));
  }
  SECTION("A vocabulary with a token for every byte but this one") {
    pieces.types[3 + 0xA9] = kNormal;
    CHECK(contains(error_of([&] { pieces.tokenizer().encode("abé"); }),
                   "the vocabulary has no token for byte 0xA9, at byte 2 of the text"));
  }
}

TEST_CASE("Malformed SentencePiece vocabularies are refused with the reason") {
  Pieces pieces;
  std::string reason;
  SECTION("Fewer scores than tokens") {
    pieces.scores.pop_back();
    reason = "259 tokens, but 258 scores";
  }
  SECTION("A score that is no number") {
    pieces.scores[7] = std::numeric_limits<float>::quiet_NaN();
    reason = "a score is not a finite number";
  }
  SECTION("A byte spelled in another way") {
    pieces.tokens[3] = "<0x0a>";
    reason = R"(a byte is spelled like "<0x0A>")";
  }
  SECTION("A type that does not exist") {
    pieces.types[5] = 7;
    reason = "has type 7, which is not 1 to 6";
  }
  SECTION("No token for a printable character") {
    pieces = Pieces(false);
    reason = "no token for byte 0x0A";
  }
  CAPTURE(pieces.refusal(), reason);
  CHECK(contains(pieces.refusal(), reason));
  CHECK(contains(pieces.refusal(), "pieces.gguf: "));
}
