// Both config layouts, the flat print-out, differences, findings and hostile configs.
#include "loader/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "loader/config_schema.h"
#include "loader/error.h"

namespace dsv41 {
namespace {

using nlohmann::ordered_json;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const std::string kRelease = DSV41_TEST_DATA "/release/";

ordered_json load(const std::string& path) {
  return ordered_json::parse(std::ifstream(path));
}
ordered_json released_flat() {
  return load(kRelease + "inference_config.json");
}
ordered_json released_nested() {
  return load(kRelease + "config.json");
}

std::string refusal(const std::string& json) {
  try {
    parse_config(json, "config");
  } catch (const CheckpointError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Config, ReleasedPairReadsTheSameAndPrintsTheFlatFile) {
  const ModelConfig nested = read_config(kRelease + "config.json"),
                    flat = read_config(kRelease + "inference_config.json");
  for (const ModelConfig* config : {&nested, &flat}) {
    const ordered_json printed = ordered_json::parse(to_flat_json(*config));
    EXPECT_EQ(printed, released_flat());
    std::vector<std::string> keys, released_keys;
    for (const auto& [key, value] : printed.items()) keys.push_back(key);
    const ordered_json released = released_flat();
    for (const auto& [key, value] : released.items()) released_keys.push_back(key);
    EXPECT_EQ(keys, released_keys);
    EXPECT_EQ(keys.size(), 64u);
    EXPECT_THAT(config_findings(*config), IsEmpty());
  }
  EXPECT_THAT(differing_fields(nested, flat),
              ElementsAre("param_dtype", "model_type", "architectures", "bos_token_id", "eos_token_id",
                          "pad_token_id", "hidden_act", "max_position_embeddings", "num_key_value_heads",
                          "tie_word_embeddings", "topk_method", "norm_topk_prob"));
  EXPECT_EQ(nlohmann::json::parse(to_nested_json(nested)), nlohmann::json::parse(released_nested().dump()));
  EXPECT_THAT(differing_fields(parse_config(to_nested_json(nested), "again"), nested), IsEmpty());
  EXPECT_THAT(differing_fields(parse_config(to_flat_json(flat), "again"), flat), IsEmpty());
}

TEST(Config, ReleasedValuesLandInTheirMembers) {
  const ModelConfig c = read_config(kRelease + "config.json");
  EXPECT_EQ(c.dim, 5120u);
  EXPECT_EQ(c.dtype, "fp8");
  EXPECT_EQ(c.nested.dtype, "bfloat16");
  EXPECT_EQ(c.norm_eps, 1e-20);
  EXPECT_EQ(c.compress_ratios.size(), 43u);
  EXPECT_EQ(c.engram_num_embeddings, (std::vector<std::uint64_t>{384006168, 384016682}));
  EXPECT_FALSE(c.vision_max_wh_ratio);
  EXPECT_EQ(c.nested.norm_topk_prob, true);
  EXPECT_EQ(c.eos_id(), 1u);
  EXPECT_EQ(c.max_positions(), 1048576u);
  EXPECT_EQ(c.n_hash_columns(), 24u);
  EXPECT_EQ(c.mode(0), AttentionMode::Window);
  EXPECT_EQ(c.mode(20), AttentionMode::Full);
  EXPECT_EQ(c.mode(24), AttentionMode::Reindex);
  EXPECT_EQ(c.mode(25), AttentionMode::Reuse);
  EXPECT_EQ(c.mode(42), AttentionMode::Window);
  EXPECT_EQ(c.kv_source(39), 20u);
  EXPECT_EQ(c.index_source(39), 36u);
  EXPECT_EQ(c.kv_source(13), 8u);
  EXPECT_EQ(c.engram_index(14), 1u);
  EXPECT_EQ(c.engram_index(2), std::nullopt);
  EXPECT_EQ(c.experts_of(39), 384u);
  EXPECT_EQ(c.experts_of(40), 128u);
}

TEST(Config, EveryBundledCheckpointHasTwoEqualConfigsWithoutFindings) {
  for (const char* name : {"mini", "capitals"}) {
    const std::filesystem::path directory = std::filesystem::path(DSV41_TEST_CHECKPOINTS) / name;
    EXPECT_EQ(find_config(directory), directory / "config.json");
    const ModelConfig nested = read_config(directory / "config.json"),
                      flat = read_config(directory / "inference/config.json");
    EXPECT_EQ(differing_fields(nested, flat).size(), 12u);
    EXPECT_THAT(config_findings(nested), IsEmpty()) << name;
  }
}

/// Every field of the table is required in its layout, typed, and seen by differing_fields.
TEST(Config, EveryFieldIsReadFromBothLayouts) {
  const ModelConfig original = parse_config(released_nested().dump(), "original");
  std::size_t flat_fields = 0;
  for (const ConfigField& field : config_fields()) {
    std::string pointer = "/" + std::string(field.nested);
    std::replace(pointer.begin(), pointer.end(), '.', '/');
    const ordered_json::json_pointer at(pointer);
    ordered_json json = released_nested();
    ASSERT_TRUE(json.contains(at)) << field.nested;
    const ordered_json value = json[at];
    const std::string parent = at.parent_pointer().to_string();
    json[at.parent_pointer()].erase(std::string(at.back()));
    if (field.nested_only())
      EXPECT_THAT(differing_fields(parse_config(json.dump(), "x"), original),
                  ElementsAre(std::string(field.flat)));
    else
      EXPECT_THAT(refusal(json.dump()), HasSubstr("\"" + std::string(field.nested) + "\" is missing"));
    json[at] = ordered_json::object();
    EXPECT_THAT(refusal(json.dump()), HasSubstr("\"" + std::string(field.nested) + "\" should be")) << parent;
    json[at] = value.is_string()    ? ordered_json("other")
               : value.is_array()   ? ordered_json::array()
               : value.is_boolean() ? ordered_json(!value.get<bool>())
                                    : ordered_json(1234);
    EXPECT_THAT(differing_fields(parse_config(json.dump(), "x"), original),
                ElementsAre(std::string(field.flat)));
    if (field.nested_only()) continue;

    ++flat_fields;
    ordered_json flat = released_flat();
    flat.erase(std::string(field.flat));
    EXPECT_THAT(refusal(flat.dump()), field.flat == "dim"
                                          ? HasSubstr("not a DeepSeek-V4.1 config")
                                          : HasSubstr("\"" + std::string(field.flat) + "\" is missing"));
  }
  EXPECT_EQ(flat_fields, 64u);
  EXPECT_EQ(config_fields().size(), 76u);
}

TEST(Config, UnknownKeysAreIgnored) {
  ordered_json flat = released_flat();
  flat["some_future_key"] = {{"a", {1, 2, nullptr}}};
  EXPECT_THAT(config_findings(parse_config(flat.dump(), "x")), IsEmpty());
}

struct HostileText {
  const char* label;
  std::string json;
  const char* complaint;
};

std::string with(const std::string& key, const std::string& raw_value) {
  ordered_json flat = released_flat();
  flat[key] = "@@";
  std::string text = flat.dump();
  return text.replace(text.find("\"@@\""), 4, raw_value);
}

std::string nested_with(const char* pointer, const std::string& raw_value) {
  ordered_json nested = released_nested();
  nested[ordered_json::json_pointer(pointer)] = "@@";
  std::string text = nested.dump();
  return text.replace(text.find("\"@@\""), 4, raw_value);
}

std::string list_of(std::size_t entries) {
  std::string text = "[2";
  for (std::size_t i = 1; i < entries; ++i) text += ",2";
  return text + "]";
}

class HostileConfig : public ::testing::TestWithParam<HostileText> {};

TEST_P(HostileConfig, IsRefusedWithTheReason) {
  EXPECT_THAT(refusal(GetParam().json), HasSubstr(GetParam().complaint));
  EXPECT_THAT(refusal(GetParam().json), HasSubstr("config: "));
  EXPECT_THAT(refusal(GetParam().json), ::testing::Not(HasSubstr("\n")));
}

INSTANTIATE_TEST_SUITE_P(
    Text, HostileConfig,
    ::testing::Values(
        HostileText{"empty", "", "malformed JSON"}, HostileText{"garbage", "\xff\xfe!", "malformed JSON"},
        HostileText{"list", "[1]", "not a JSON object"}, HostileText{"number", "3", "not a JSON object"},
        HostileText{"cut", released_flat().dump().substr(0, 300), "malformed JSON"},
        HostileText{"trailing", released_flat().dump() + "x", "malformed JSON"},
        HostileText{"depth", R"({"dim":)" + std::string(2000, '[') + std::string(2000, ']') + "}",
                    "malformed JSON"},
        HostileText{"huge", R"({"dim":")" + std::string(5 << 20, 'a') + "\"}", "too many for a config"},
        HostileText{"foreign", R"({"model_type":"llama","hidden_size":4096})", "model_type llama"},
        HostileText{"text_config_is_text", R"({"text_config":"a"})", "is missing"},
        HostileText{"duplicate", R"({"dim":1,"dim":2})", "\"dim\" appears twice"},
        HostileText{"duplicate_nested", R"({"text_config":{"x":1,"x":2}})", "\"x\" appears twice"},
        HostileText{"negative", with("dim", "-5120"),
                    "\"dim\" should be a non-negative integer, it is -5120"},
        HostileText{"real_integer", with("dim", "5120.0"), "should be a non-negative integer"},
        HostileText{"string_integer", with("dim", "\"5120\""), "should be a non-negative integer"},
        HostileText{"null_integer", with("dim", "null"), "should be a non-negative integer"},
        HostileText{"above_2_31", with("vocab_size", "2147483648"), "should be an integer below 2^31"},
        HostileText{"above_2_64", with("vocab_size", "18446744073709551616"), "malformed JSON"},
        HostileText{"nan", with("norm_eps", "NaN"), "malformed JSON"},
        HostileText{"infinity", with("norm_eps", "1e999"), "malformed JSON"},
        HostileText{"text_number", with("rope_theta", "\"1\""), "should be a number"},
        HostileText{"list_of_text", with("compress_ratios", R"(["a"])"), "should be a non-negative integer"},
        HostileText{"number_for_list", with("compress_ratios", "2"), "should be a list"},
        HostileText{"long_list", with("kv_source_layers", list_of(4097)),
                    "\"kv_source_layers\" has 4097 entries; at most 4096 are read"},
        HostileText{"long_nested_list", nested_with("/text_config/index_source_layer_ids", list_of(500'000)),
                    "\"text_config.index_source_layer_ids\" has 500000 entries"},
        HostileText{"long_nested_only_list", nested_with("/architectures", list_of(4097)),
                    "\"architectures\" has 4097 entries"},
        HostileText{"many_blocks", with("n_layers", "4094"),
                    "n_layers 4094 + n_mtp_layers 3 are more than 4096"},
        HostileText{"most_blocks", with("n_layers", "2147483647"), "are more than 4096 blocks"},
        HostileText{"number_for_text", with("dtype", "8"), "should be a string"},
        HostileText{"newline_in_text", with("dim", R"("a\nb")"), "should be a non-negative integer"}),
    [](const auto& test) { return std::string(test.param.label); });

struct Unrunnable {
  const char* label;
  std::function<void(ModelConfig&)> change;
  const char* finding;
};

class ConfigFindings : public ::testing::TestWithParam<Unrunnable> {};

TEST_P(ConfigFindings, NamesWhatCannotRun) {
  ModelConfig config = read_config(kRelease + "config.json");
  GetParam().change(config);
  EXPECT_THAT(config_findings(config), Contains(HasSubstr(GetParam().finding)));
}

using C = ModelConfig;
INSTANTIATE_TEST_SUITE_P(
    Released, ConfigFindings,
    ::testing::Values(
        Unrunnable{"zero_dim", [](C& c) { c.dim = 0; }, "dim is 0"},
        Unrunnable{"odd_dim", [](C& c) { c.dim = 5121; }, "dim is 5121; it must be a multiple of 32"},
        Unrunnable{"odd_q", [](C& c) { c.q_lora_rank = 40; }, "q_lora_rank is 40"},
        Unrunnable{"odd_inner", [](C& c) { c.moe_inter_dim = 2300; }, "moe_inter_dim is 2300"},
        Unrunnable{"odd_group", [](C& c) { c.o_lora_rank = 2; }, "o_groups*o_lora_rank is 16"},
        Unrunnable{"odd_head", [](C& c) { c.head_dim = 500; }, "head_dim is 500"},
        Unrunnable{"groups", [](C& c) { c.o_groups = 7; }, "n_heads 64 is not a multiple of o_groups 7"},
        Unrunnable{"no_groups", [](C& c) { c.o_groups = 0; }, "o_groups is 0"},
        Unrunnable{"rope_odd", [](C& c) { c.rope_head_dim = 63; }, "rope_head_dim is 63"},
        Unrunnable{"rope_wide", [](C& c) { c.rope_head_dim = 514; }, "rope_head_dim is 514"},
        Unrunnable{"rope_index", [](C& c) { c.rope_head_dim = 130; },
                   "rope_head_dim 130 exceeds index_head_dim 128"},
        Unrunnable{"index_head", [](C& c) { c.index_head_dim = 100; }, "index_head_dim is 100"},
        Unrunnable{"ratios_short", [](C& c) { c.compress_ratios.pop_back(); },
                   "compress_ratios has 42 entries"},
        Unrunnable{"draft_ratio", [](C& c) { c.compress_ratios[41] = 2; }, "compress_ratios[41] is 2"},
        Unrunnable{"kv_order", [](C& c) { std::swap(c.kv_source_layers[0], c.kv_source_layers[1]); },
                   "kv_source_layers must ascend"},
        Unrunnable{"kv_outside", [](C& c) { c.kv_source_layers.back() = 40; },
                   "kv_source_layers names layer 40 of 40"},
        Unrunnable{"kv_window", [](C& c) { c.kv_source_layers.insert(c.kv_source_layers.begin(), 1); },
                   "layer 1, whose compress_ratio is 0"},
        Unrunnable{"kv_not_index", [](C& c) { c.index_source_layers.erase(c.index_source_layers.begin()); },
                   "KV source 2 is not in index_source_layers"},
        Unrunnable{"first_not_source", [](C& c) { c.kv_source_layers.erase(c.kv_source_layers.begin()); },
                   "layer 2 has compress_ratio 2 but no KV source"},
        Unrunnable{"no_sources", [](C& c) { c.kv_source_layers.clear(); }, "no KV source at or below it"},
        Unrunnable{"mixed_ratio", [](C& c) { c.compress_ratios[30] = 4; },
                   "layer 30 has compress_ratio 4, its KV source 20 has 1"},
        Unrunnable{"candidates", [](C& c) { c.candidate_topk_blocks = 64; },
                   "candidate_topk_blocks 64 * candidate_block_size 8 is below index_topk 512"},
        Unrunnable{"candidate_source", [](C& c) { c.candidate_source_layer = 21; },
                   "candidate_source_layer 21 is not in index_source_layers"},
        Unrunnable{"candidate_ratio", [](C& c) { c.candidate_source_layer = 14; },
                   "its candidates come from layer 14 with 2"},
        Unrunnable{"topk_experts", [](C& c) { c.n_activated_experts = 385; }, "n_activated_experts is 385"},
        Unrunnable{"no_topk", [](C& c) { c.n_activated_experts = 0; }, "n_activated_experts is 0"},
        Unrunnable{"draft_topk", [](C& c) { c.dspark_n_activated_experts = 129; },
                   "dspark_n_activated_experts is 129"},
        Unrunnable{"shared", [](C& c) { c.n_shared_experts = 2; }, "n_shared_experts is 2"},
        Unrunnable{"score", [](C& c) { c.score_func = "softmax"; }, "score_func is \"softmax\""},
        Unrunnable{"dtype", [](C& c) { c.dtype = "bf16"; }, "dtype is \"bf16\""},
        Unrunnable{"expert_dtype", [](C& c) { c.expert_dtype = "fp8"; }, "expert_dtype is \"fp8\""},
        Unrunnable{"tables", [](C& c) { c.engram_num_embeddings.pop_back(); },
                   "engram_num_embeddings has 1 entries for 2"},
        Unrunnable{"table_rows", [](C& c) { c.engram_num_embeddings[0] = 0; },
                   "engram_num_embeddings holds 0"},
        Unrunnable{"engram_layer", [](C& c) { c.engram_layer_ids[1] = 40; },
                   "engram_layer_ids names layer 40"},
        Unrunnable{"engram_width", [](C& c) { c.engram_head_dim = 48; }, "engram_head_dim is 48"},
        Unrunnable{"engram_grams", [](C& c) { c.engram_max_ngram_size = 1; }, "engram_max_ngram_size is 1"},
        Unrunnable{"engram_map", [](C& c) { c.engram_compressed_vocab_size = 200000; },
                   "engram_compressed_vocab_size is 200000"},
        Unrunnable{"pad", [](C& c) { c.engram_pad_id = 129280; }, "engram_pad_id 129280"},
        Unrunnable{"noise", [](C& c) { c.dspark_noise_token_id = 129280; }, "dspark_noise_token_id 129280"},
        Unrunnable{"targets", [](C& c) { c.dspark_target_layer_ids = {40}; },
                   "dspark_target_layer_ids must name layers below 40"},
        Unrunnable{"image", [](C& c) { c.image_token_id = 129280; }, "image_token_id 129280"},
        Unrunnable{"bos", [](C& c) { c.nested.bos_token_id = 129280; }, "bos_token_id 129280"},
        Unrunnable{"eps", [](C& c) { c.norm_eps = 0; }, "norm_eps is 0"},
        Unrunnable{"eps_tiny", [](C& c) { c.norm_eps = 1e-60; }, "norm_eps is 1e-60"},
        Unrunnable{"theta", [](C& c) { c.rope_theta = -1; }, "rope_theta is -1"},
        Unrunnable{"nan", [](C& c) { c.route_scale = std::nan(""); }, "route_scale is nan"},
        Unrunnable{"vision_heads", [](C& c) { c.vision_n_heads = 3; }, "vision_n_heads 3"},
        Unrunnable{"many_layers", [](C& c) { c.n_layers = 2000000000; }, "are more than 4000000"},
        Unrunnable{"many_experts", [](C& c) { c.n_routed_experts = 2000000000; }, "are more than 4000000"},
        Unrunnable{"wide_heads", [](C& c) { c.n_heads = c.head_dim = 1u << 24; },
                   "n_heads*head_dim = 16777216 * 16777216 exceeds"}),
    [](const auto& test) { return std::string(test.param.label); });

/// Geometry is free where arithmetic allows it.
TEST(ConfigFindings, OtherGeometriesRun) {
  ModelConfig c = read_config(kRelease + "config.json");
  c.n_layers = 4;
  c.n_mtp_layers = 0;
  c.compress_ratios = {3, 3, 5, 0};
  c.kv_source_layers = c.index_source_layers = {0, 2};
  c.candidate_source_layer = 2;
  c.engram_layer_ids = {0};
  c.engram_num_embeddings = {1000};
  c.n_heads = c.o_groups = 3;
  c.o_lora_rank = 96;
  c.vocab_size = 131071;
  c.n_routed_experts = 7;
  c.window_size = 1;
  c.original_seq_len = 0;
  EXPECT_THAT(config_findings(c), IsEmpty());
  c.compress_ratios = {0, 0, 0, 0};
  c.kv_source_layers = c.index_source_layers = {};
  c.engram_layer_ids = {};
  c.engram_num_embeddings = {};
  EXPECT_THAT(config_findings(c), IsEmpty());
}

}  // namespace
}  // namespace dsv41
