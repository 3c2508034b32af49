// Tokens that are recognised in raw text before it is split: control markers and the like.
// Which match wins, and what the flags do, is as in the tokenizers library (docs/tokenizer.md, "Added
// tokens").
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace dsv41 {

struct AddedToken {
  std::uint32_t id = 0;
  std::string content;
  bool special = false;                          // skip_special leaves it out
  bool normalized = false;                       // looked for only after those that are not
  bool single_word = false;                      // only where no word character touches it
  bool left_strip = false, right_strip = false;  // takes the white space beside it
};

/// Finds the tokens of one pass (all normalized, or all not): leftmost first, longest of those that start
/// there.
class AddedTokenMatcher {
 public:
  explicit AddedTokenMatcher(std::vector<AddedToken> tokens);

  /// Calls text(std::string_view) for stretches without a token and token(id) for tokens, in order.
  template <class Text, class Token>
  void split(std::string_view input, Text&& text, Token&& token) const {
    std::size_t done = 0;
    for (std::size_t from = 0;;) {
      const std::optional<Match> match = find(input, from, done);
      if (!match) break;
      from = match->resume;
      if (match->begin > done) text(input.substr(done, match->begin - done));
      token(match->id);
      done = match->end;
    }
    if (done < input.size()) text(input.substr(done));
  }

 private:
  struct Match {
    std::uint32_t id;
    std::size_t begin, end;  // with stripped white space
    std::size_t resume;  // end of the spelling itself: the next match may begin inside stripped white space
  };
  std::optional<Match> find(std::string_view input, std::size_t from, std::size_t done) const;
  const AddedToken* longest_at(std::string_view text) const;

  std::vector<AddedToken> tokens_;  // sorted by content
  std::vector<bool> starts_;        // by first byte
};

}  // namespace dsv41
