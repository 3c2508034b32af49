// One Split of the pre-tokenizer: a regular expression in the syntax of Oniguruma, run by PCRE2.
// Only the syntax on which both engines agree is accepted (docs/tokenizer.md, "Patterns").
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace dsv41 {

class SplitPattern {
 public:
  /// Throws CheckpointError for a pattern that is malformed, may match nothing, or uses syntax outside the
  /// subset.
  explicit SplitPattern(std::string_view regex);
  ~SplitPattern();
  SplitPattern(SplitPattern&&) noexcept;

  /// What one thread needs to search; not shared between threads.
  class Workspace {
   public:
    explicit Workspace(const SplitPattern& pattern);
    ~Workspace();
    Workspace(Workspace&&) noexcept;

   private:
    friend class SplitPattern;
    struct Impl;
    std::unique_ptr<Impl> impl_;
  };

  struct Match {
    std::size_t begin, end;
  };
  /// The first match at or after `from`; `text` is valid UTF-8 and ends where the pattern may look.
  std::optional<Match> find(std::string_view text, std::size_t from, Workspace& workspace) const;

  /// Behaviour "Isolated": calls piece(std::string_view) for every match and for every stretch between
  /// matches.
  template <class Piece>
  void split(std::string_view text, Workspace& workspace, Piece&& piece) const {
    std::size_t done = 0;
    while (done < text.size()) {
      const std::optional<Match> match = find(text, done, workspace);
      if (!match) break;
      if (match->begin > done) piece(text.substr(done, match->begin - done));
      piece(text.substr(match->begin, match->end - match->begin));
      done = match->end;
    }
    if (done < text.size()) piece(text.substr(done));
  }

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The pattern in PCRE2's syntax, with every character class brought to Unicode 16.
std::string translate_pattern(std::string_view regex);

}  // namespace dsv41
