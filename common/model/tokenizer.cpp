#include "common/model/tokenizer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <queue>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "common/base/check.h"
#include "common/base/text.h"
#include "common/base/utf8.h"
#include "common/model/pieces.h"
#include "common/model/unicode.h"

namespace common {
namespace {

constexpr const char* kRuleKey = "tokenizer.ggml.pre";
constexpr Token kNoToken = -1;
constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();

// --- Merging ----------------------------------------------------------------------------------------------------

struct Merge {
  double rank = 0.0;  // lower ranks merge first
  Token result = kNoToken;
};

// A part of the text: at first a byte or a character, later what has merged.
struct Symbol {
  Token token = kNoToken;  // kNoToken: the vocabulary lacks this character
  std::size_t begin = 0;   // in the text, in bytes
  std::size_t size = 0;    // 0 once absorbed by the left neighbour
  std::size_t previous = kNone;
  std::size_t next = kNone;
};

// Repeatedly applies the merge of the lowest rank, the leftmost on a tie. A linked list of symbols and a heap of
// candidate pairs make this O(n log n) for n symbols. Scanning all pairs for each merge would be O(n^2): minutes for a
// long text without spaces. find_merge(left, right) gives the Merge of two neighbours, or nothing.
template <typename FindMerge>
class Merger {
 public:
  // The symbols' links are set here.
  Merger(std::vector<Symbol> symbols, const FindMerge& find_merge)
      : symbols_(std::move(symbols)), find_merge_(find_merge) {
    for (std::size_t i = 0; i < symbols_.size(); ++i) {
      symbols_[i].previous = i == 0 ? kNone : i - 1;
      symbols_[i].next = i + 1 == symbols_.size() ? kNone : i + 1;
    }
    for (std::size_t i = 0; i + 1 < symbols_.size(); ++i) {
      propose(i);
    }
  }

  // Calls use(symbol) for what is left when nothing merges any more.
  template <typename Use>
  void run(const Use& use) {
    while (!candidates_.empty()) {
      const Candidate candidate = candidates_.top();
      candidates_.pop();
      if (is_current(candidate)) {
        apply(candidate);
      }
    }
    // The first symbol is never absorbed, because a merged pair takes the place of its left symbol.
    for (std::size_t i = symbols_.empty() ? kNone : 0; i != kNone; i = symbols_[i].next) {
      use(symbols_[i]);
    }
  }

 private:
  struct Candidate {
    Merge merge;
    std::size_t left;
    std::size_t left_size;
    std::size_t right_size;
    bool operator>(const Candidate& other) const {
      return std::tie(merge.rank, left) > std::tie(other.merge.rank, other.left);
    }
  };

  void propose(std::size_t left) {
    const std::size_t right = symbols_[left].next;
    if (right == kNone) {
      return;
    }
    if (const std::optional<Merge> merge = find_merge_(symbols_[left], symbols_[right])) {
      candidates_.push({*merge, left, symbols_[left].size, symbols_[right].size});
    }
  }

  // A candidate is stale if one of its symbols has merged since. It is not removed from the heap, but dropped when it
  // is popped.
  bool is_current(const Candidate& candidate) const {
    const Symbol& left = symbols_[candidate.left];
    return left.size == candidate.left_size && left.next != kNone && symbols_[left.next].size == candidate.right_size;
  }

  void apply(const Candidate& candidate) {
    Symbol& left = symbols_[candidate.left];
    Symbol& right = symbols_[left.next];
    left.token = candidate.merge.result;
    left.size += right.size;
    left.next = right.next;
    right.size = 0;
    if (left.next != kNone) {
      symbols_[left.next].previous = candidate.left;
    }
    if (left.previous != kNone) {
      propose(left.previous);
    }
    propose(candidate.left);
  }

  std::vector<Symbol> symbols_;
  const FindMerge& find_merge_;
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> candidates_;
};

class MergeTable {
 public:
  void reserve(std::size_t count) { merges_.reserve(count); }
  bool insert(Token left, Token right, int rank, Token result) {
    return merges_.emplace(key(left, right), std::pair(rank, result)).second;
  }
  std::optional<Merge> find(Token left, Token right) const {
    const auto found = merges_.find(key(left, right));
    return found == merges_.end()
               ? std::nullopt
               : std::optional(Merge{static_cast<double>(found->second.first), found->second.second});
  }

 private:
  static std::uint64_t key(Token left, Token right) {
    return std::uint64_t{static_cast<std::uint32_t>(left)} << 32U | static_cast<std::uint32_t>(right);
  }
  std::unordered_map<std::uint64_t, std::pair<int, Token>> merges_;
};

// --- The spelling of bytes --------------------------------------------------------------------------------------

// GPT-2 spells tokens with one printable character for each byte, so that a vocabulary is readable text: bytes that are
// printable in Latin-1 stand for themselves, the other 68 are U+0100 and up, in order. A blank becomes U+0120, "Ġ".
std::array<char32_t, 256> byte_spellings() {
  std::array<char32_t, 256> spellings{};
  char32_t next = 0x100;
  for (char32_t byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
    spellings[byte] = printable ? byte : next++;
  }
  return spellings;
}

std::unordered_map<char32_t, char> bytes_by_spelling() {
  std::unordered_map<char32_t, char> bytes;
  const std::array<char32_t, 256> spellings = byte_spellings();
  for (std::size_t byte = 0; byte < spellings.size(); ++byte) {
    bytes.emplace(spellings[byte], static_cast<char>(static_cast<unsigned char>(byte)));
  }
  return bytes;
}

// The bytes that a token's spelling stands for. Throws InputError if one of its characters stands for no byte.
std::string decode_spelling(std::string_view spelling) {
  static const std::unordered_map<char32_t, char> byte_of = bytes_by_spelling();
  std::string bytes;
  for (std::size_t offset = 0; offset < spelling.size();) {
    const Utf8Character character = decode_utf8(spelling, offset);
    const auto found = byte_of.find(character.code_point);
    if (found == byte_of.end()) {
      throw InputError("its character at byte " + std::to_string(offset) + " stands for no byte");
    }
    bytes.push_back(found->second);
    offset += character.num_bytes;
  }
  return bytes;
}

// SentencePiece spells a blank as U+2581, and the byte 0x0A as "<0x0A>".
constexpr std::string_view kBlank = "\xE2\x96\x81";

std::string replaced(std::string_view text, std::string_view from, std::string_view to) {
  std::string result;
  for (std::size_t at = 0; at < text.size();) {
    const bool found = text.substr(at).starts_with(from);
    result.append(found ? to : text.substr(at, 1));
    at += found ? from.size() : 1;
  }
  return result;
}

// The byte that "<0x0A>" stands for. Throws InputError on any other spelling.
std::string decode_byte_spelling(const std::string& spelling) {
  constexpr std::string_view kDigits = "0123456789ABCDEF";
  const auto digit = [&](std::size_t at) { return spelling.size() == 6 ? kDigits.find(spelling[at]) : kDigits.npos; };
  if (digit(3) == kDigits.npos || digit(4) == kDigits.npos || !spelling.starts_with("<0x") || spelling[5] != '>') {
    throw InputError("a byte is spelled like \"<0x0A>\"");
  }
  return {static_cast<char>(static_cast<unsigned char>(16 * digit(3) + digit(4)))};
}

// Values of tokenizer.ggml.token_type (llama.cpp's enum llama_token_type). Only SentencePiece has kByte.
enum class TokenType : std::int64_t {
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,
  kUserDefined = 4,
  kUnused = 5,
  kByte = 6
};

struct TokenEntry {
  TokenType type = TokenType::kNormal;
  std::string bytes;  // what decode() gives
};

bool is_matchable(TokenType type) {
  return type == TokenType::kControl || type == TokenType::kUnknown || type == TokenType::kUserDefined;
}

}  // namespace

struct Tokenizer::Impl {
  explicit Impl(const Gguf& file);

  [[noreturn]] static void refuse(const Gguf& file, const std::string& reason) {
    throw InputError(file.name() + ": tokenizer: " + reason);
  }
  static bool reads_sentence_piece(const Gguf& file);
  static PieceRule read_piece_rule(const Gguf& file);
  void read_tokens(const Gguf& file);
  TokenEntry read_token(const Gguf& file, std::size_t id, const std::string& spelling, std::int64_t type) const;
  void read_scores(const Gguf& file);
  void read_merges(const Gguf& file);
  Token read_merge_part(const Gguf& file, const std::string& merge, std::string_view part) const;
  void find_byte_tokens(const Gguf& file);
  std::optional<Token> read_optional_id(const Gguf& file, const char* key) const;
  void find_ends(const Gguf& file);

  void encode_plain(std::string_view text, std::size_t text_offset, std::vector<Token>& out) const;
  void encode_pieces(std::string_view text, std::size_t text_offset, std::vector<Token>& out) const;
  void encode_sentence(std::string_view plain, std::size_t text_offset, std::vector<Token>& out) const;
  Token byte_token(char character, std::size_t offset) const;  // offset: in the text, for errors
  std::optional<Token> special_at(std::string_view text, std::size_t offset, bool with_control) const;

  bool is_sentence_piece = false;
  PieceRule piece_rule = PieceRule::kDefault;
  bool composes = false;          // text is brought to normalisation form C first
  bool add_space_prefix = false;  // SentencePiece: adds a blank before a text and after a special token
  bool add_bos = false;
  std::optional<Token> bos;
  std::optional<Token> eos;
  std::vector<Token> ends;               // eos first
  std::vector<TokenEntry> tokens;        // [vocab_size]
  std::array<Token, 256> byte_tokens{};  // kNoToken where the vocabulary lacks the byte
  MergeTable merges;
  std::vector<float> scores;  // SentencePiece: [vocab_size], higher ones merge first
  std::map<std::string, Token, std::less<>> special_by_spelling;  // control, unknown and user-defined ones
  std::array<std::vector<Token>, 256> specials_by_first_byte;     // longest first

  // Normal tokens by their bytes, which are in `tokens`. Only these take part in merging, so plain text never becomes a
  // control token.
  std::unordered_map<std::string_view, Token> normal_by_bytes;
};

Tokenizer::Impl::Impl(const Gguf& file) : is_sentence_piece(reads_sentence_piece(file)) {
  piece_rule = is_sentence_piece ? PieceRule::kDefault : read_piece_rule(file);
  read_tokens(file);
  find_byte_tokens(file);
  // Qwen's own tokenizer does this; DeepSeek's models of the same rule do not.
  composes = !is_sentence_piece && file.has(kRuleKey) && file.get_string(kRuleKey) == "qwen2";
  if (is_sentence_piece) {
    read_scores(file);
    add_space_prefix = file.get_bool("tokenizer.ggml.add_space_prefix", true);
  } else {
    read_merges(file);
  }
  bos = read_optional_id(file, "tokenizer.ggml.bos_token_id");
  eos = read_optional_id(file, "tokenizer.ggml.eos_token_id");
  find_ends(file);
  // Files without this key are from before there was a choice.
  const bool usual = bos.has_value() && (is_sentence_piece || piece_rule == PieceRule::kLlama3);
  add_bos = file.get_bool("tokenizer.ggml.add_bos_token", usual);
  if (add_bos && !bos) {
    refuse(file, "add_bos_token is set, but there is no bos_token_id");
  }
  if (!is_sentence_piece && piece_rule != PieceRule::kLlama3) {
    normal_by_bytes = {};  // only needed while loading
  }
}

bool Tokenizer::Impl::reads_sentence_piece(const Gguf& file) {
  const std::string& model = file.get_string("tokenizer.ggml.model");
  if (model != "gpt2" && model != "llama") {
    refuse(file, "model " + quote(model) +
                     R"( is not supported (supported: "gpt2", byte-level BPE, and "llama", SentencePiece))");
  }
  return model == "llama";
}

PieceRule Tokenizer::Impl::read_piece_rule(const Gguf& file) {
  const std::string name = file.has(kRuleKey) ? file.get_string(kRuleKey) : "default";
  const std::optional<PieceRule> rule = find_piece_rule(name);
  if (!rule) {
    refuse(file, "pre-tokenizer " + quote(name) +
                     R"( is not supported (supported: "gpt-2", "smollm", "llama-bpe", "qwen2", "default"))");
  }
  return *rule;
}

void Tokenizer::Impl::read_tokens(const Gguf& file) {
  const std::vector<std::string>& spellings = file.get_strings("tokenizer.ggml.tokens");
  const std::vector<std::int64_t>& types = file.get_ints("tokenizer.ggml.token_type");
  if (spellings.size() != types.size()) {
    refuse(file, std::to_string(spellings.size()) + " tokens, but " + std::to_string(types.size()) + " token types");
  }
  if (spellings.size() > static_cast<std::size_t>(std::numeric_limits<Token>::max())) {
    refuse(file, "too many tokens");
  }
  std::unordered_map<std::string_view, std::size_t> ids;  // the spelling is the identity of a token
  ids.reserve(spellings.size());
  tokens.reserve(spellings.size());
  for (std::size_t id = 0; id < spellings.size(); ++id) {
    const auto [first, is_new] = ids.emplace(spellings[id], id);
    if (!is_new) {
      refuse(file, "tokens " + std::to_string(first->second) + " and " + std::to_string(id) + " are both " +
                       quote(spellings[id]));
    }
    tokens.push_back(read_token(file, id, spellings[id], types[id]));
    const TokenEntry& entry = tokens.back();
    if (is_matchable(entry.type)) {
      special_by_spelling.emplace(entry.bytes, static_cast<Token>(id));
      specials_by_first_byte[static_cast<unsigned char>(entry.bytes.front())].push_back(static_cast<Token>(id));
    }
  }
  normal_by_bytes.reserve(tokens.size());
  for (std::size_t id = 0; id < tokens.size(); ++id) {
    if (tokens[id].type == TokenType::kNormal) {
      normal_by_bytes.emplace(tokens[id].bytes, static_cast<Token>(id));
    }
  }
  for (std::vector<Token>& specials : specials_by_first_byte) {
    std::stable_sort(specials.begin(), specials.end(), [this](Token a, Token b) {
      return tokens[static_cast<std::size_t>(a)].bytes.size() > tokens[static_cast<std::size_t>(b)].bytes.size();
    });
  }
}

TokenEntry Tokenizer::Impl::read_token(const Gguf& file, std::size_t id, const std::string& spelling,
                                       std::int64_t type) const {
  const std::string what = "token " + std::to_string(id) + " (" + quote(spelling) + ")";
  const auto last_type = static_cast<std::int64_t>(is_sentence_piece ? TokenType::kByte : TokenType::kUnused);
  if (type < static_cast<std::int64_t>(TokenType::kNormal) || type > last_type) {
    refuse(file, what + " has type " + std::to_string(type) + ", which is not 1 to " + std::to_string(last_type));
  }
  if (spelling.empty()) {
    refuse(file, what + " is empty");
  }
  const auto token_type = static_cast<TokenType>(type);
  try {
    if (token_type == TokenType::kNormal && !is_sentence_piece) {
      return {token_type, decode_spelling(spelling)};
    }
    if (token_type == TokenType::kByte) {
      return {token_type, decode_byte_spelling(spelling)};
    }
    // Other tokens are spelled as plain text, which must be UTF-8.
    check_utf8(spelling);
    return {token_type, token_type == TokenType::kNormal ? replaced(spelling, kBlank, " ") : spelling};
  } catch (const InputError& error) {
    refuse(file, what + ": " + error.what());
  }
}

// In byte-level BPE, these are the tokens of one byte; in SentencePiece, they spell characters that the vocabulary
// lacks. Real vocabularies lack bytes that did not occur in their training text (SmolLM2: 21 of them, control
// characters and first bytes of unassigned planes). Text that contains them is refused; a vocabulary without ASCII is
// broken.
void Tokenizer::Impl::find_byte_tokens(const Gguf& file) {
  std::array<Token, 256> spelled_out{};
  spelled_out.fill(kNoToken);
  for (std::size_t id = 0; id < tokens.size(); ++id) {
    if (tokens[id].type == TokenType::kByte) {
      spelled_out[static_cast<unsigned char>(tokens[id].bytes.front())] = static_cast<Token>(id);
    }
  }
  for (std::size_t byte = 0; byte < 256; ++byte) {
    const auto found = normal_by_bytes.find(std::string(1, static_cast<char>(static_cast<unsigned char>(byte))));
    byte_tokens[byte] =
        found == normal_by_bytes.end() || spelled_out[byte] != kNoToken ? spelled_out[byte] : found->second;
    const bool is_plain_text = byte == '\n' || (byte >= 0x20 && byte <= 0x7E);
    if (is_plain_text && byte_tokens[byte] == kNoToken) {
      refuse(file, format("no token for byte 0x%02zX", byte));
    }
  }
}

void Tokenizer::Impl::read_scores(const Gguf& file) {
  const std::vector<double>& values = file.get_floats("tokenizer.ggml.scores");
  if (values.size() != tokens.size()) {
    refuse(file, std::to_string(tokens.size()) + " tokens, but " + std::to_string(values.size()) + " scores");
  }
  if (!std::all_of(values.begin(), values.end(), [](double value) { return std::isfinite(value); })) {
    refuse(file, "a score is not a finite number");
  }
  std::transform(values.begin(), values.end(), std::back_inserter(scores),
                 [](double value) { return static_cast<float>(value); });
}

void Tokenizer::Impl::read_merges(const Gguf& file) {
  const std::vector<std::string>& lines = file.get_strings("tokenizer.ggml.merges");
  merges.reserve(lines.size());
  for (std::size_t rank = 0; rank < lines.size(); ++rank) {
    const std::string& line = lines[rank];
    const std::size_t gap = line.find(' ');
    if (gap == std::string::npos || line.find(' ', gap + 1) != std::string::npos) {
      refuse(file, "merge " + std::to_string(rank) + " (" + quote(line) + ") is not two tokens with a space between");
    }
    const Token left = read_merge_part(file, line, std::string_view(line).substr(0, gap));
    const Token right = read_merge_part(file, line, std::string_view(line).substr(gap + 1));
    const std::string bytes =
        tokens[static_cast<std::size_t>(left)].bytes + tokens[static_cast<std::size_t>(right)].bytes;
    const auto result = normal_by_bytes.find(bytes);
    if (result == normal_by_bytes.end()) {
      refuse(file, "merge " + quote(line) + " makes a token that is not in the vocabulary");
    }
    if (!merges.insert(left, right, static_cast<int>(rank), result->second)) {
      refuse(file, "merge " + quote(line) + " appears twice");
    }
  }
}

Token Tokenizer::Impl::read_merge_part(const Gguf& file, const std::string& merge, std::string_view part) const {
  std::string bytes;
  try {
    bytes = decode_spelling(part);
  } catch (const InputError&) {
    refuse(file, "merge " + quote(merge) + " has a part that spells no bytes");
  }
  const auto found = normal_by_bytes.find(bytes);
  if (found == normal_by_bytes.end()) {
    refuse(file, "merge " + quote(merge) + ": " + quote(part) + " is not in the vocabulary");
  }
  return found->second;
}

std::optional<Token> Tokenizer::Impl::read_optional_id(const Gguf& file, const char* key) const {
  if (!file.has(key)) {
    return std::nullopt;
  }
  const std::int64_t id = file.get_int(key);
  if (id < 0 || id >= static_cast<std::int64_t>(tokens.size())) {
    refuse(file, std::string(key) + " is " + std::to_string(id) + ", but there are " + std::to_string(tokens.size()) +
                     " tokens");
  }
  return static_cast<Token>(id);
}

// Files name one end of text, and chat models have two: Qwen 2.5 ends a reply with <|im_end|>, its EOS, and a text with
// <|endoftext|>, which no key names. llama.cpp knows them by their spellings too (llama-vocab.cpp).
void Tokenizer::Impl::find_ends(const Gguf& file) {
  const auto add = [this](std::optional<Token> token) {
    if (token && std::find(ends.begin(), ends.end(), *token) == ends.end()) {
      ends.push_back(*token);
    }
  };
  add(eos);
  for (const char* const key : {"tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"}) {
    add(read_optional_id(file, key));
  }
  for (const std::string_view spelling : {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>",
                                          "<end_of_turn>", "<|end|>", "<EOT>"}) {
    const auto found = special_by_spelling.find(spelling);
    if (found != special_by_spelling.end() &&
        tokens[static_cast<std::size_t>(found->second)].type == TokenType::kControl) {
      add(found->second);
    }
  }
}

Token Tokenizer::Impl::byte_token(char character, std::size_t offset) const {
  const auto byte = static_cast<unsigned char>(character);
  if (byte_tokens[byte] == kNoToken) {
    throw InputError(
        format("the vocabulary has no token for byte 0x%02X, at byte %zu of the text", unsigned{byte}, offset));
  }
  return byte_tokens[byte];
}

void Tokenizer::Impl::encode_plain(std::string_view text, std::size_t text_offset, std::vector<Token>& out) const {
  if (is_sentence_piece) {
    encode_sentence(text, text_offset, out);
  } else {
    encode_pieces(composes ? composed(text) : text, text_offset, out);
  }
}

void Tokenizer::Impl::encode_pieces(std::string_view text, std::size_t text_offset, std::vector<Token>& out) const {
  const auto find_merge = [this](const Symbol& left, const Symbol& right) {
    return merges.find(left.token, right.token);
  };
  std::size_t offset = text_offset;
  for (const std::string_view piece : cut_into_pieces(text, piece_rule)) {
    // Llama 3's vocabulary holds words that its merges do not make.
    const auto whole = piece_rule == PieceRule::kLlama3 ? normal_by_bytes.find(piece) : normal_by_bytes.end();
    if (whole != normal_by_bytes.end()) {
      out.push_back(whole->second);
    } else {
      std::vector<Symbol> bytes;
      bytes.reserve(piece.size());
      for (std::size_t i = 0; i < piece.size(); ++i) {
        bytes.push_back({byte_token(piece[i], offset + i), i, 1});
      }
      Merger(std::move(bytes), find_merge).run([&](const Symbol& symbol) { out.push_back(symbol.token); });
    }
    offset += piece.size();
  }
}

// The whole text is one piece, made of characters. Two neighbours merge if the vocabulary has them as a token, the one
// with the highest score first.
void Tokenizer::Impl::encode_sentence(std::string_view plain, std::size_t text_offset, std::vector<Token>& out) const {
  if (plain.empty()) {
    return;
  }
  std::string text(add_space_prefix ? 1 : 0, ' ');
  text.append(replaced(plain, kBlank, " "));
  const auto part = [&](std::size_t begin, std::size_t size) { return std::string_view(text).substr(begin, size); };
  const auto find_merge = [&](const Symbol& left, const Symbol& right) -> std::optional<Merge> {
    const auto found = normal_by_bytes.find(part(left.begin, left.size + right.size));
    if (found == normal_by_bytes.end()) {
      return std::nullopt;
    }
    return Merge{-static_cast<double>(scores[static_cast<std::size_t>(found->second)]), found->second};
  };
  std::vector<Symbol> characters;
  for (std::size_t offset = 0; offset < text.size();) {
    const std::size_t size = decode_utf8(text, offset).num_bytes;
    const auto found = normal_by_bytes.find(part(offset, size));
    characters.push_back({found == normal_by_bytes.end() ? kNoToken : found->second, offset, size});
    offset += size;
  }
  Merger(std::move(characters), find_merge).run([&](const Symbol& symbol) {
    if (symbol.token != kNoToken) {
      out.push_back(symbol.token);
      return;
    }
    for (const char byte : part(symbol.begin, symbol.size)) {
      // No blank is ever missing, so this is the byte's place in the text, except for the blank in front.
      out.push_back(byte_token(byte, text_offset + symbol.begin - (add_space_prefix ? 1 : 0)));
    }
  });
}

std::optional<Token> Tokenizer::Impl::special_at(std::string_view text, std::size_t offset, bool with_control) const {
  for (const Token token : specials_by_first_byte[static_cast<unsigned char>(text[offset])]) {
    const TokenEntry& entry = tokens[static_cast<std::size_t>(token)];
    if ((with_control || entry.type == TokenType::kUserDefined) && text.substr(offset).starts_with(entry.bytes)) {
      return token;
    }
  }
  return std::nullopt;
}

Tokenizer::Tokenizer(const Gguf& file) : impl_(std::make_unique<Impl>(file)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

std::vector<Token> Tokenizer::encode(std::string_view text, bool parse_special) const {
  check_utf8(text);  // before the text is cut, so that offsets in errors count from its beginning
  std::vector<Token> result;
  std::size_t plain_begin = 0;
  for (std::size_t offset = 0; offset < text.size();) {
    // Leftmost first; at one place the longest spelling wins.
    const std::optional<Token> special = impl_->special_at(text, offset, parse_special);
    if (!special) {
      ++offset;
      continue;
    }
    impl_->encode_plain(text.substr(plain_begin, offset - plain_begin), plain_begin, result);
    result.push_back(*special);
    offset += impl_->tokens[static_cast<std::size_t>(*special)].bytes.size();
    plain_begin = offset;
  }
  impl_->encode_plain(text.substr(plain_begin), plain_begin, result);
  return result;
}

std::vector<Token> Tokenizer::encode_prompt(std::string_view text, bool parse_special) const {
  std::vector<Token> result = encode(text, parse_special);
  if (impl_->add_bos) {
    result.insert(result.begin(), *impl_->bos);
  }
  return result;
}

std::string Tokenizer::decode(std::span<const Token> tokens, bool show_special) const {
  std::string text;
  for (const Token token : tokens) {
    COMMON_CHECK(token >= 0 && token < vocab_size(), "token " + std::to_string(token) + " is not in the vocabulary");
    const TokenEntry& entry = impl_->tokens[static_cast<std::size_t>(token)];
    // User-defined tokens are text that has a token of its own; the other kinds are not text.
    const bool is_text =
        entry.type == TokenType::kNormal || entry.type == TokenType::kUserDefined || entry.type == TokenType::kByte;
    if (is_text || show_special) {
      text += entry.bytes;
    }
  }
  return text;
}

std::string Tokenizer::decode_text(std::span<const Token> tokens) const {
  std::string text = decode(tokens);
  return impl_->add_space_prefix && text.starts_with(' ') ? text.substr(1) : text;
}

int Tokenizer::vocab_size() const { return static_cast<int>(impl_->tokens.size()); }
bool Tokenizer::add_bos() const { return impl_->add_bos; }
std::optional<Token> Tokenizer::bos() const { return impl_->bos; }
std::optional<Token> Tokenizer::eos() const { return impl_->eos; }
const std::vector<Token>& Tokenizer::ends() const { return impl_->ends; }

std::optional<Token> Tokenizer::find(std::string_view spelling) const {
  const auto found = impl_->special_by_spelling.find(spelling);
  return found == impl_->special_by_spelling.end() ? std::nullopt : std::optional<Token>(found->second);
}

}  // namespace common
