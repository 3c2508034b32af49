// Byte-level BPE as released in tokenizer.json: added tokens, the Split pre-tokenizers, BPE, the byte
// decoder. Equal to Hugging Face `tokenizers` (tests/loader/tokenizer_test.cc).
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace dsv41 {

class Tokenizer {
 public:
  /// Throws CheckpointError for a file that is missing, malformed, or uses a component this class does not
  /// have.
  explicit Tokenizer(const std::filesystem::path& tokenizer_json);
  static Tokenizer from_json(std::string_view json, std::string_view name_for_messages);
  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;

  std::size_t vocab_size() const;  // highest id + 1

  /// Ids of valid UTF-8 text; added tokens written in it are recognised. No BOS is added. Thread-safe.
  std::vector<std::uint32_t> encode(std::string_view text) const;
  /// The same with no added token recognised: user text that must not form a marker.
  std::vector<std::uint32_t> encode_plain(std::string_view text) const;

  /// Text of ids; invalid UTF-8 becomes U+FFFD (one per maximal invalid prefix). Ids out of range contribute
  /// nothing.
  std::string decode(std::span<const std::uint32_t> ids, bool skip_special = false) const;
  /// Raw bytes one id stands for (special tokens: their spelling).
  std::string_view token_bytes(std::uint32_t id) const;
  /// The vocabulary spelling (byte-level alphabet), as the Engram map needs it.
  std::string_view token_spelling(std::uint32_t id) const;
  bool is_special(std::uint32_t id) const;
  std::optional<std::uint32_t> id_of(std::string_view spelling) const;

 private:
  struct Impl;
  explicit Tokenizer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// Turns a stream of ids into text: bytes of an incomplete UTF-8 sequence wait until it is complete or proves
/// invalid.
class StreamingDecoder {
 public:
  StreamingDecoder(const Tokenizer& tokenizer, bool skip_special)
      : tokenizer_(tokenizer), skip_special_(skip_special) {}
  /// Text that is certain after this id; may be empty.
  std::string push(std::uint32_t id);
  /// What is left, with invalid bytes replaced.
  std::string finish();

 private:
  const Tokenizer& tokenizer_;
  bool skip_special_;
  std::string pending_;
};

/// Whether bytes are valid UTF-8 (no surrogates, no overlong forms).
bool is_valid_utf8(std::string_view bytes);

}  // namespace dsv41
