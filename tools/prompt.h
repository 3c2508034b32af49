// From the command line's prompt to token ids.
#pragma once

#include <cstdint>
#include <vector>

#include "loader/config.h"
#include "loader/tokenizer.h"
#include "tools/options.h"

namespace dsv41 {

/// BOS and the tokens of a text, or the given ids as they are. Throws UsageError: unreadable or empty file,
/// invalid UTF-8, ids outside the vocabulary, a prompt longer than the context.
std::vector<std::uint32_t> prompt_tokens(const Options& options, const Tokenizer& tokenizer,
                                         const ModelConfig& config);

}  // namespace dsv41
