// Nothing is tuned to one geometry: random checkpoints of other shapes keep every invariance of the forward
// pass.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>

#include "engram/hashing.h"
#include "loader/tree_writer.h"
#include "tests/loader/support/temporary_directory.h"
#include "tests/runtime/support/local_model.h"

namespace dsv41::test {
namespace {

struct Geometry {
  const char* name;
  std::function<void(ModelConfig&)> change;  // from the bundled mini checkpoint
};

std::ostream& operator<<(std::ostream& out, const Geometry& geometry) {
  return out << geometry.name;
}

class OtherGeometry : public ::testing::TestWithParam<Geometry> {
 protected:
  void SetUp() override {
    config_ = read_config(bundled("mini") / "config.json");
    GetParam().change(config_);
    config_.engram_num_embeddings.clear();
    for (const HashLayer& layer : derive_hash_layout(config_))
      config_.engram_num_embeddings.push_back(layer.rows);
    directory_ = process_directory() / (std::string("geometry_") + GetParam().name);
    std::filesystem::remove_all(directory_);
    write_tree(config_, directory_, {Payload::Random, 5, {}, bundled("mini") / "tokenizer.json"});
    for (std::uint32_t i = 0; i < 60; ++i) ids_.push_back((i * i * 37 + 11) % 768);
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  ModelConfig config_;
  std::filesystem::path directory_;
  std::vector<std::uint32_t> ids_;
};

bool same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

TEST_P(OtherGeometry, KeepsEveryInvariance) {
  LocalModel plain(directory_, 64, 1);
  const auto expected = plain.all_logits(ids_, ids_.size());
  for (const float value : expected) ASSERT_TRUE(std::isfinite(value));
  for (const std::size_t chunk : {1u, 5u, 16u})
    EXPECT_TRUE(same_bits(plain.all_logits(ids_, chunk), expected)) << chunk;
  for (std::size_t i = 0; i < backend_count(); ++i) {
    if (!backend(i).usable) continue;
    LocalModel model(directory_, 64, 3, backend(i).ops->name);
    EXPECT_TRUE(same_bits(model.all_logits(ids_, ids_.size()), expected)) << backend(i).ops->name;
    EXPECT_TRUE(same_bits(model.all_logits(ids_, 1), expected)) << backend(i).ops->name;
  }
}

TEST_P(OtherGeometry, SkippedRowsChangeNothing) {
  LocalModel model(directory_, 64, 2);
  const auto expected = model.all_logits(ids_, ids_.size());
  const std::size_t width = config_.vocab_size, prompt = ids_.size() - 6;
  for (const std::size_t chunk : {7u, 64u}) {
    Sequence sequence(config_);
    Step step;
    for (std::size_t done = 0; done < ids_.size();) {
      const std::size_t rows = done < prompt ? std::min(chunk, prompt - done) : 1;
      const bool sampled = done + rows >= prompt;
      step.clear();
      step.add(sequence, std::span(ids_).subspan(done, rows), sampled ? 1 : 0,
               done < prompt ? static_cast<std::uint32_t>(prompt) : 0);
      done += rows;
      const auto logits = model.backbone.forward(step);
      if (sampled) {
        EXPECT_TRUE(same_bits(logits, std::span(expected).subspan((done - 1) * width, width))) << done;
      }
    }
  }
}

const Geometry kGeometries[] = {
    {"released_modes", [](ModelConfig&) {}},
    {"odd_counts",
     [](ModelConfig& c) {
       c.dim = 160, c.q_lora_rank = 96, c.moe_inter_dim = 96, c.n_routed_experts = 7,
       c.n_activated_experts = 5;
       c.n_heads = 5, c.o_groups = 5, c.o_lora_rank = 32, c.head_dim = 96, c.rope_head_dim = 20,
       c.index_n_heads = 3;
       c.index_head_dim = 32, c.dspark_n_routed_experts = 5, c.dspark_n_activated_experts = 1,
       c.vocab_size = 777, c.engram_compressed_vocab_size = 619;  // ids without a token add one empty key
     }},
    {"rows_no_multiple_of_32",
     [](ModelConfig& c) {
       c.n_heads = 6, c.o_groups = 3, c.o_lora_rank = 32, c.index_n_heads = 5, c.vocab_size = 769,
       c.engram_compressed_vocab_size = 619;
     }},
    {"other_ratios_and_window",
     [](ModelConfig& c) {
       c.window_size = 5;
       c.compress_ratios = {0, 3, 3, 4, 4, 4, 1, 1, 1, 0, 0, 0, 0};
       c.kv_source_layers = {1, 3, 6};
       c.index_source_layers = {1, 3, 5, 6, 7};
       c.candidate_source_layer = 6;
     }},
    {"compressed_from_layer_0",
     [](ModelConfig& c) {
       c.compress_ratios = {2, 2, 0, 2, 2, 2, 2, 2, 2, 2, 0, 0, 0};
       c.kv_source_layers = {0};
       c.index_source_layers = {0, 4, 8};
       c.candidate_source_layer = 4;
       c.window_size = 1;
     }},
    {"window_only",
     [](ModelConfig& c) {
       c.compress_ratios.assign(c.compress_ratios.size(), 0);
       c.kv_source_layers.clear();
       c.index_source_layers.clear();
     }},
    {"engram_on_layer_0",
     [](ModelConfig& c) {
       c.engram_layer_ids = {0, 9}, c.engram_n_heads = 3, c.engram_max_ngram_size = 3;
     }},
    {"no_engram", [](ModelConfig& c) { c.engram_layer_ids.clear(); }},
    {"one_draft_stage",
     [](ModelConfig& c) {
       c.n_mtp_layers = 1, c.dspark_target_layer_ids = {9}, c.compress_ratios.resize(11);
     }},
    {"no_draft_stage",
     [](ModelConfig& c) {
       c.n_mtp_layers = 0, c.dspark_target_layer_ids.clear(), c.compress_ratios.resize(10);
     }},
    {"two_copies", [](ModelConfig& c) { c.hc_mult = 2, c.n_activated_experts = 1; }},
};

INSTANTIATE_TEST_SUITE_P(Shapes, OtherGeometry, ::testing::ValuesIn(kGeometries),
                         [](const auto& shape) { return std::string(shape.param.name); });

}  // namespace
}  // namespace dsv41::test
