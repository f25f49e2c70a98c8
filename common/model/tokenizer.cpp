#include "common/model/tokenizer.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <queue>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "common/base/check.h"
#include "common/base/text.h"
#include "common/base/utf8.h"
#include "common/model/unicode.h"

namespace common {
namespace {

constexpr Token kNoToken = -1;
constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();

// --- Cutting text into pieces -----------------------------------------------------------------------------------
//
// Merges never cross the border of a piece. GPT-2 cuts with the regular expression
//   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// (https://github.com/openai/gpt-2/blob/master/src/encoder.py). SmolLM first makes every number character a piece of
// its own and applies the expression to the text between them, so that a digit acts like the end of the text.

enum class CharacterClass : std::uint8_t { kSpace, kLetter, kNumber, kOther };

CharacterClass classify(char32_t code_point) {
  if (is_space(code_point)) {
    return CharacterClass::kSpace;
  }
  if (is_letter(code_point)) {
    return CharacterClass::kLetter;
  }
  return is_number(code_point) ? CharacterClass::kNumber : CharacterClass::kOther;
}

class PieceScanner {
 public:
  PieceScanner(std::string_view text, bool split_digits) : text_(text), split_digits_(split_digits) {
    for (std::size_t offset = 0; offset < text.size();) {
      const Utf8Character character = decode_utf8(text, offset);
      offsets_.push_back(offset);
      classes_.push_back(classify(character.code_point));
      offset += character.num_bytes;
    }
    offsets_.push_back(text.size());
  }

  // The pieces in order. Joined, they are the text.
  std::vector<std::string_view> pieces() const {
    std::vector<std::string_view> result;
    for (std::size_t begin = 0; begin < classes_.size();) {
      const std::size_t limit = section_end(begin);
      while (begin < limit) {
        const std::size_t end = piece_end(begin, limit);
        result.push_back(slice(begin, end));
        begin = end;
      }
    }
    return result;
  }

 private:
  // All positions below count characters, not bytes.
  std::string_view slice(std::size_t begin, std::size_t end) const {
    return text_.substr(offsets_[begin], offsets_[end] - offsets_[begin]);
  }

  // The expression is applied to one section at a time: the whole text, or if digits are split a single number
  // character or the text up to the next one.
  std::size_t section_end(std::size_t begin) const {
    if (!split_digits_) {
      return classes_.size();
    }
    if (classes_[begin] == CharacterClass::kNumber) {
      return begin + 1;
    }
    const auto from = classes_.begin() + static_cast<std::ptrdiff_t>(begin);
    return static_cast<std::size_t>(std::find(from, classes_.end(), CharacterClass::kNumber) - classes_.begin());
  }

  std::size_t run_end(std::size_t begin, std::size_t limit) const {
    std::size_t end = begin + 1;
    while (end < limit && classes_[end] == classes_[begin]) {
      ++end;
    }
    return end;
  }

  // Length of the contraction that begins here, or 0. GPT-2 does not recognise contractions in upper case.
  std::size_t contraction_length(std::size_t begin, std::size_t limit) const {
    const std::string_view rest = slice(begin, limit);
    for (const std::string_view contraction : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"}) {
      if (rest.starts_with(contraction)) {
        return contraction.size();
      }
    }
    return 0;
  }

  // The end of the match of the expression's first alternative that matches at `begin`.
  std::size_t piece_end(std::size_t begin, std::size_t limit) const {
    const std::size_t contraction = contraction_length(begin, limit);
    if (contraction > 0) {
      return begin + contraction;
    }
    // One blank (only U+0020, not any space) joins the word, number or punctuation after it.
    const bool blank_joins =
        text_[offsets_[begin]] == ' ' && begin + 1 < limit && classes_[begin + 1] != CharacterClass::kSpace;
    const std::size_t first = blank_joins ? begin + 1 : begin;
    const std::size_t end = run_end(first, limit);
    if (classes_[first] != CharacterClass::kSpace) {
      return end;
    }
    // \s+(?!\S): of several spaces before other text, the last one is left to that text; a single one is kept (\s+).
    const bool text_follows = end < limit;
    return text_follows && end - begin > 1 ? end - 1 : end;
  }

  std::string_view text_;
  bool split_digits_;
  std::vector<std::size_t> offsets_;     // [num_characters + 1] byte offset of each character, then of the end
  std::vector<CharacterClass> classes_;  // [num_characters]
};

// --- Merging within a piece -------------------------------------------------------------------------------------

struct Merge {
  int rank = 0;  // place in the list of merges; lower ranks merge first
  Token result = kNoToken;
};

class MergeTable {
 public:
  void reserve(std::size_t count) { merges_.reserve(count); }
  bool insert(Token left, Token right, Merge merge) { return merges_.emplace(key(left, right), merge).second; }
  const Merge* find(Token left, Token right) const {
    const auto found = merges_.find(key(left, right));
    return found == merges_.end() ? nullptr : &found->second;
  }

 private:
  static std::uint64_t key(Token left, Token right) {
    return std::uint64_t{static_cast<std::uint32_t>(left)} << 32U | static_cast<std::uint32_t>(right);
  }
  std::unordered_map<std::uint64_t, Merge> merges_;
};

// Repeatedly applies the merge of the lowest rank, the leftmost on a tie. A linked list of symbols and a heap of
// candidate pairs make this O(n log n) for n bytes. Scanning all pairs for each merge would be O(n^2): minutes for a
// long text without spaces.
class PieceMerger {
 public:
  PieceMerger(const MergeTable& merges, std::span<const Token> bytes) : merges_(merges) {
    symbols_.reserve(bytes.size());
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      symbols_.push_back({bytes[i], i == 0 ? kNone : i - 1, i + 1 == bytes.size() ? kNone : i + 1});
    }
    for (std::size_t i = 0; i + 1 < bytes.size(); ++i) {
      propose(i);
    }
  }

  void run() {
    while (!candidates_.empty()) {
      const Candidate candidate = candidates_.top();
      candidates_.pop();
      if (is_current(candidate)) {
        apply(candidate);
      }
    }
  }

  void append_to(std::vector<Token>& out) const {
    // The first symbol is never absorbed, because a merged pair takes the place of its left symbol.
    for (std::size_t i = symbols_.empty() ? kNone : 0; i != kNone; i = symbols_[i].next) {
      out.push_back(symbols_[i].token);
    }
  }

 private:
  struct Symbol {
    Token token;  // kNoToken once absorbed by its left neighbour
    std::size_t previous;
    std::size_t next;
  };

  struct Candidate {
    Merge merge;
    std::size_t left;
    Token left_token;
    Token right_token;
    bool operator>(const Candidate& other) const {
      return std::tie(merge.rank, left) > std::tie(other.merge.rank, other.left);
    }
  };

  void propose(std::size_t left) {
    const std::size_t right = symbols_[left].next;
    if (right == kNone) {
      return;
    }
    const Token left_token = symbols_[left].token;
    const Token right_token = symbols_[right].token;
    if (const Merge* merge = merges_.find(left_token, right_token)) {
      candidates_.push({*merge, left, left_token, right_token});
    }
  }

  // A candidate is stale if one of its symbols has merged since. It is not removed from the heap, but dropped when it
  // is popped.
  bool is_current(const Candidate& candidate) const {
    const Symbol& left = symbols_[candidate.left];
    return left.token == candidate.left_token && left.next != kNone &&
           symbols_[left.next].token == candidate.right_token;
  }

  void apply(const Candidate& candidate) {
    Symbol& left = symbols_[candidate.left];
    Symbol& right = symbols_[left.next];
    left.token = candidate.merge.result;
    left.next = right.next;
    right.token = kNoToken;
    if (left.next != kNone) {
      symbols_[left.next].previous = candidate.left;
    }
    if (left.previous != kNone) {
      propose(left.previous);
    }
    propose(candidate.left);
  }

  const MergeTable& merges_;
  std::vector<Symbol> symbols_;
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> candidates_;
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

// Values of tokenizer.ggml.token_type (llama.cpp's enum llama_token_type). 6, a byte, belongs to other tokenizers.
enum class TokenType : std::int64_t { kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kUnused = 5 };

struct TokenEntry {
  TokenType type = TokenType::kNormal;
  std::string bytes;  // what decode() gives
};

bool is_matchable(TokenType type) { return type == TokenType::kControl || type == TokenType::kUserDefined; }

}  // namespace

struct Tokenizer::Impl {
  explicit Impl(const Gguf& file);

  [[noreturn]] static void refuse(const Gguf& file, const std::string& reason) {
    throw InputError(file.name() + ": tokenizer: " + reason);
  }
  static bool reads_split_digits(const Gguf& file);
  void read_tokens(const Gguf& file);
  TokenEntry read_token(const Gguf& file, std::size_t id, const std::string& spelling, std::int64_t type) const;
  void read_merges(const Gguf& file);
  Token read_merge_part(const Gguf& file, const std::string& merge, std::string_view part) const;
  void find_byte_tokens(const Gguf& file);
  std::optional<Token> read_optional_id(const Gguf& file, const char* key) const;

  void encode_plain(std::string_view text, std::size_t text_offset, std::vector<Token>& out) const;
  std::vector<Token> byte_tokens_of(std::string_view piece, std::size_t piece_offset) const;
  std::optional<Token> special_at(std::string_view text, std::size_t offset) const;

  bool split_digits = false;
  bool add_bos = false;
  std::optional<Token> bos;
  std::optional<Token> eos;
  std::vector<TokenEntry> tokens;        // [vocab_size]
  std::array<Token, 256> byte_tokens{};  // kNoToken where the vocabulary lacks the byte
  MergeTable merges;
  std::map<std::string, Token, std::less<>> special_by_spelling;  // control and user-defined tokens
  std::array<std::vector<Token>, 256> specials_by_first_byte;     // longest first

  // Normal tokens by their bytes. Only these take part in merging, so plain text never becomes a control token.
  std::unordered_map<std::string, Token> normal_by_bytes;
};

Tokenizer::Impl::Impl(const Gguf& file) : split_digits(reads_split_digits(file)) {
  read_tokens(file);
  find_byte_tokens(file);
  read_merges(file);
  bos = read_optional_id(file, "tokenizer.ggml.bos_token_id");
  eos = read_optional_id(file, "tokenizer.ggml.eos_token_id");
  add_bos = file.get_bool("tokenizer.ggml.add_bos_token", false);
  if (add_bos && !bos) {
    refuse(file, "add_bos_token is set, but there is no bos_token_id");
  }
  normal_by_bytes.clear();  // only needed while loading
}

bool Tokenizer::Impl::reads_split_digits(const Gguf& file) {
  const std::string& model = file.get_string("tokenizer.ggml.model");
  if (model != "gpt2") {
    refuse(file, "model " + quote(model) + " is not supported (supported: \"gpt2\", byte-level BPE)");
  }
  const std::string& pre = file.get_string("tokenizer.ggml.pre");
  if (pre != "smollm" && pre != "gpt-2") {
    refuse(file, "pre-tokenizer " + quote(pre) + R"( is not supported (supported: "smollm", "gpt-2"))");
  }
  return pre == "smollm";
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
    } else if (entry.type == TokenType::kNormal) {
      normal_by_bytes.emplace(entry.bytes, static_cast<Token>(id));
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
  if (type < static_cast<std::int64_t>(TokenType::kNormal) || type > static_cast<std::int64_t>(TokenType::kUnused)) {
    refuse(file, what + " has type " + std::to_string(type) + ", which is not 1 to 5");
  }
  if (spelling.empty()) {
    refuse(file, what + " is empty");
  }
  const auto token_type = static_cast<TokenType>(type);
  try {
    if (token_type == TokenType::kNormal) {
      return {token_type, decode_spelling(spelling)};
    }
    // Other tokens are spelled as plain text, which must be UTF-8.
    check_utf8(spelling);
    return {token_type, spelling};
  } catch (const InputError& error) {
    refuse(file, what + ": " + error.what());
  }
}

// Real vocabularies lack bytes that did not occur in their training text (SmolLM2: 21 of them, control characters and
// first bytes of unassigned planes). Text that contains them is refused; a vocabulary without ASCII is broken.
void Tokenizer::Impl::find_byte_tokens(const Gguf& file) {
  for (std::size_t byte = 0; byte < 256; ++byte) {
    const auto found = normal_by_bytes.find(std::string(1, static_cast<char>(static_cast<unsigned char>(byte))));
    byte_tokens[byte] = found == normal_by_bytes.end() ? kNoToken : found->second;
    const bool is_plain_text = byte == '\n' || (byte >= 0x20 && byte <= 0x7E);
    if (is_plain_text && byte_tokens[byte] == kNoToken) {
      refuse(file, format("no token for byte 0x%02zX", byte));
    }
  }
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
    if (!merges.insert(left, right, {static_cast<int>(rank), result->second})) {
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

std::vector<Token> Tokenizer::Impl::byte_tokens_of(std::string_view piece, std::size_t piece_offset) const {
  std::vector<Token> result;
  result.reserve(piece.size());
  for (std::size_t i = 0; i < piece.size(); ++i) {
    const auto byte = static_cast<unsigned char>(piece[i]);
    if (byte_tokens[byte] == kNoToken) {
      throw InputError(format("the vocabulary has no token for byte 0x%02X, at byte %zu of the text", unsigned{byte},
                              piece_offset + i));
    }
    result.push_back(byte_tokens[byte]);
  }
  return result;
}

void Tokenizer::Impl::encode_plain(std::string_view text, std::size_t text_offset, std::vector<Token>& out) const {
  std::size_t offset = text_offset;
  for (const std::string_view piece : PieceScanner(text, split_digits).pieces()) {
    const std::vector<Token> bytes = byte_tokens_of(piece, offset);
    PieceMerger merger(merges, bytes);
    merger.run();
    merger.append_to(out);
    offset += piece.size();
  }
}

std::optional<Token> Tokenizer::Impl::special_at(std::string_view text, std::size_t offset) const {
  for (const Token token : specials_by_first_byte[static_cast<unsigned char>(text[offset])]) {
    if (text.substr(offset).starts_with(tokens[static_cast<std::size_t>(token)].bytes)) {
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
  for (std::size_t offset = 0; parse_special && offset < text.size();) {
    // Leftmost first; at one place the longest spelling wins.
    const std::optional<Token> special = impl_->special_at(text, offset);
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
    const bool is_text = entry.type == TokenType::kNormal || entry.type == TokenType::kUserDefined;
    if (is_text || show_special) {
      text += entry.bytes;
    }
  }
  return text;
}

int Tokenizer::vocab_size() const { return static_cast<int>(impl_->tokens.size()); }
bool Tokenizer::add_bos() const { return impl_->add_bos; }
std::optional<Token> Tokenizer::bos() const { return impl_->bos; }
std::optional<Token> Tokenizer::eos() const { return impl_->eos; }

std::optional<Token> Tokenizer::find(std::string_view spelling) const {
  const auto found = impl_->special_by_spelling.find(spelling);
  return found == impl_->special_by_spelling.end() ? std::nullopt : std::optional<Token>(found->second);
}

}  // namespace common
