// SHA-256 (FIPS 180-4), for digests that golden files state.
#pragma once

#include <string>
#include <string_view>

namespace dsv41::testing {

/// In lower-case hexadecimal.
std::string sha256(std::string_view bytes);

}  // namespace dsv41::testing
