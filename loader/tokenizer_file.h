// tokenizer.json as plain data: parsed, checked, and refused where it asks for something that is not
// implemented. Spec: docs/tokenizer.md, "The file".
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "loader/added_tokens.h"
#include "loader/byte_pairs.h"

namespace dsv41 {

struct TokenizerFile {
  std::vector<std::string> spellings;  // by id, in the byte-level alphabet; empty where no token has the id
  std::array<std::uint32_t, 256> byte_ids{};
  std::vector<BytePairs::Merge> merges;  // in order of rank
  std::vector<AddedToken> added;
  std::vector<std::string> patterns;  // of the Split steps, in order
};

/// Throws CheckpointError that begins with `name`.
TokenizerFile parse_tokenizer_file(std::string_view json, std::string_view name);

/// Bytes that a spelling stands for; a spelling with a character outside the byte-level alphabet stands for
/// itself.
std::string spelled_bytes(std::string_view spelling);

}  // namespace dsv41
