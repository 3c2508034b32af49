// The one table of config fields: flat key, nested path, type, member (spec: docs/checkpoint.md, "Two config
// layouts"). Reading either layout, printing the flat one and comparing two configs are loops over it.
#pragma once

#include <span>
#include <string_view>
#include <variant>

#include "loader/config.h"

namespace dsv41 {

template <typename Owner>
using MemberOf = std::variant<std::uint32_t Owner::*, std::uint64_t Owner::*, double Owner::*,
                              std::string Owner::*, std::vector<std::uint32_t> Owner::*,
                              std::vector<std::uint64_t> Owner::*, std::vector<std::string> Owner::*,
                              std::optional<double> Owner::*, std::optional<std::string> Owner::*,
                              std::optional<std::uint32_t> Owner::*, std::optional<bool> Owner::*>;

struct ConfigField {
  std::string_view flat;    // key of the flat layout; for nested-only fields the name used in messages
  std::string_view nested;  // dotted path in the nested layout
  std::variant<MemberOf<ModelConfig>, MemberOf<ModelConfig::Nested>> member;
  bool nested_only() const { return member.index() == 1; }
};

/// The 64 flat fields in the released order, then the twelve that only the nested layout has.
std::span<const ConfigField> config_fields();

/// Calls visit(reference to the member of `config`); Config is ModelConfig or const ModelConfig.
template <typename Config, typename Visitor>
decltype(auto) visit_member(const ConfigField& field, Config& config, Visitor&& visitor) {
  return std::visit(
      [&](const auto& owner) -> decltype(auto) {
        return std::visit(
            [&](auto member) -> decltype(auto) {
              if constexpr (requires { config.*member; })
                return visitor(config.*member);
              else
                return visitor(config.nested.*member);
            },
            owner);
      },
      field.member);
}

}  // namespace dsv41
