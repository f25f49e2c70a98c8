// Cuts text into the pieces that byte-level BPE works in: merges never cross the border of a piece. Each vocabulary
// belongs to the rule with which it was made.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace common {

enum class PieceRule {
  kGpt2,     // 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
             //   (https://github.com/openai/gpt-2/blob/master/src/encoder.py)
  kSmolLm,   // first every \p{N} is a piece of its own; GPT-2's rule for the text between them
  kLlama3,   // (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|
             //   \s*[\r\n]+|\s+(?!\S)|\s+
  kQwen2,    // the same with \p{N} in place of \p{N}{1,3}
  kDefault,  // files that name no rule: first runs of [\p{P}$+<=>^~|], then GPT-2's rule between them, then runs of
             //   \p{N}, and three digits [0-9] at a time of these
};

// The rule that tokenizer.ggml.pre names: "gpt-2", "smollm", "llama-bpe", "qwen2", "default". Nothing for other names.
std::optional<PieceRule> find_piece_rule(std::string_view name);

// The pieces in order. Joined, they are the text, which must be valid UTF-8.
std::vector<std::string_view> cut_into_pieces(std::string_view text, PieceRule rule);

}  // namespace common
