// Tokenizers of two kinds, read from a GGUF's tokenizer.ggml.* keys: byte-level byte-pair encoding as GPT-2 introduced
// it, and SentencePiece's with byte fallback (Llama 2).
// Sources: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), section 2.2, and Sennrich et
// al., arXiv 1508.07909, for the merging; Kudo and Richardson, arXiv 1808.06226, for SentencePiece.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/tensor.h"
#include "common/model/gguf.h"

namespace common {

class Tokenizer {
 public:
  // Throws InputError unless tokenizer.ggml.model is "llama" (SentencePiece) or "gpt2" with a tokenizer.ggml.pre that
  // pieces.h knows, and on a malformed vocabulary.
  explicit Tokenizer(const Gguf& file);
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;
  ~Tokenizer();

  // Text to tokens, without BOS. Spellings of user-defined tokens inside the text become those tokens; spellings of
  // control tokens do when parse_special is set, and are ordinary text otherwise. Throws InputError, naming the byte
  // offset, on invalid UTF-8, and on a byte that the vocabulary has no token for.
  std::vector<Token> encode(std::string_view text, bool parse_special = false) const;

  // encode(), with BOS put in front if the model needs one (tokenizer.ggml.add_bos_token).
  std::vector<Token> encode_prompt(std::string_view text, bool parse_special = false) const;

  // The bytes of the tokens, in order; a character may be split over several tokens. Control tokens give no bytes
  // unless show_special is set; user-defined ones are text. The blank that SentencePiece puts in front of a text is
  // kept: tokens do not say whether they begin a text or continue one.
  std::string decode(std::span<const Token> tokens, bool show_special = false) const;

  // decode() of a whole text's tokens, without that blank.
  std::string decode_text(std::span<const Token> tokens) const;

  int vocab_size() const;
  bool add_bos() const;
  std::optional<Token> bos() const;
  std::optional<Token> eos() const;
  // The tokens that end a text: EOS first, then the ends of turns and messages that the file names
  // (tokenizer.ggml.eot_token_id, eom_token_id) and the control tokens that are spelled like one.
  const std::vector<Token>& ends() const;
  std::optional<Token> find(std::string_view spelling) const;  // a special token by its spelling, "<|im_end|>"

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace common
