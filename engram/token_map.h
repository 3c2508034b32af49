// The compressed token map: token id -> number of its normalized text (spec: docs/engram.md).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "loader/tokenizer.h"

namespace dsv41 {

struct TokenMap {
  std::vector<std::uint32_t> compressed;  // [vocab_size]
  std::uint32_t size = 0;                 // number of distinct keys
};

/// Builds the map for ids 0 … vocab_size-1.
TokenMap build_token_map(const Tokenizer& tokenizer, std::uint32_t vocab_size);

/// NFKC, NFD, drop category M, lowercase, collapse white space, trim; `text` itself when nothing is left.
std::string engram_key(std::string_view text);

}  // namespace dsv41
