#include "runtime/index_selection.h"

#include <algorithm>
#include <cmath>

namespace dsv41 {

IndexSelection::IndexSelection(const ModelContext& context)
    : context_(context), candidates_(context.max_rows), selected_(context.max_rows) {
  const ModelConfig& config = context.config;
  const std::size_t width = std::size_t{config.index_n_heads} * config.index_head_dim;
  if (config.index_source_layers.empty()) return;
  // Two correctly rounded square roots and a division in fp64: the product rounds to the contract's fp32
  // constant.
  head_weight_scale_ = static_cast<float>(1.0 / std::sqrt(double{1} * config.index_head_dim) /
                                          std::sqrt(double{1} * config.index_n_heads));
  query_.resize(context.max_rows * width);
  head_weights_.resize(context.max_rows * config.index_n_heads);
  query_codes_.resize(context.max_rows * width / 2);
  query_names_.resize(context.max_rows);
  query_scales_.resize(context.max_rows * width / kBlock);
}

void IndexSelection::select(const RowSet& rows, std::uint32_t layer, std::span<const BFloat16> x,
                            const QuantizedRows& qr, const RopeTable& rope) {
  PhaseTimer timer(context_.recorder, Phase::Indexer);
  const ModelConfig& config = context_.config;
  const std::uint32_t ratio = config.compress_ratios[layer];
  const std::uint32_t source = config.kv_source(layer);
  queries(rows, layer, x, qr, rope);

  for (const Segment& segment : rows.segments) {
    const CompressedCache& cache = segment.sequence->compressed(source);
    for (std::size_t i = 0; i < segment.rows; ++i) {
      const std::size_t row = segment.first_row + i;
      const std::size_t origin = rows.origins[row];
      const std::size_t visible = (segment.start + i + 1) / ratio;
      if (layer > config.candidate_source_layer) {
        score_candidates(cache, row, visible, candidates_[origin], selected_[origin]);
      } else {
        score_all(cache, row, visible);
        if (layer == config.candidate_source_layer) choose_candidates(candidates_[origin]);
        select_groups(scores_, config.index_topk, {}, 1, selected_[origin]);
      }
    }
  }
  if (context_.observer != nullptr) show(rows, layer);
}

void IndexSelection::show(const RowSet& rows, std::uint32_t layer) const {
  const auto observe = [&](const char* name, const auto& lists, std::size_t slots) {
    std::vector<std::int32_t> padded(rows.rows() * slots, -1);
    for (std::size_t row = 0; row < rows.rows(); ++row)
      std::copy(lists[rows.origins[row]].begin(), lists[rows.origins[row]].end(),
                padded.begin() + static_cast<std::ptrdiff_t>(row * slots));
    context_.observe<std::int32_t>(name, static_cast<int>(layer), padded);
  };
  observe("index.selected", selected_, context_.config.index_topk);
  if (layer == context_.config.candidate_source_layer)
    observe("index.candidates", candidates_, context_.config.candidate_topk_blocks);
}

void IndexSelection::queries(const RowSet& rows, std::uint32_t layer, std::span<const BFloat16> x,
                             const QuantizedRows& qr, const RopeTable& rope) {
  const ModelConfig& config = context_.config;
  const IndexQueryWeights& weights = *context_.weights.blocks[layer].attention.index_query;
  const std::size_t heads = config.index_n_heads, dim = config.index_head_dim, width = heads * dim;
  const Ops& ops = context_.compute.ops();

  context_.compute.linear(qr, weights.wq_b, first(query_, rows.rows() * width));
  context_.compute.linear(x, weights.weights_proj, first(head_weights_, rows.rows() * heads));
  for (BFloat16& weight : first(head_weights_, rows.rows() * heads))
    weight = to_bfloat16(static_cast<double>(to_float(weight)) * static_cast<double>(head_weight_scale_));
  for (std::size_t row = 0; row < rows.rows(); ++row) query_names_[row] = Compute::new_name();
  context_.compute.threads().parallel_for(rows.rows() * heads, 8, [&](Range range) {
    for (std::size_t head = range.begin; head < range.end; ++head) {
      BFloat16* query = query_.data() + head * dim;
      const std::uint32_t origin = rows.origins[head / heads];
      ops.rotate(query, 1, dim, rope.pairs(), rope.cosine(origin), rope.sine(origin), false);
      ops.quantize_index(query, 1, dim, query_codes_.data() + head * dim / 2,
                         query_scales_.data() + head * dim / kBlock);
    }
  });
}

IndexQuery IndexSelection::query(std::size_t row) const {
  const std::size_t heads = context_.config.index_n_heads, dim = context_.config.index_head_dim;
  return {query_codes_.data() + row * heads * dim / 2,
          query_scales_.data() + row * heads * dim / kBlock,
          head_weights_.data() + row * heads,
          heads,
          dim,
          query_names_[row]};
}

void IndexSelection::score_all(const CompressedCache& cache, std::size_t row, std::size_t visible) {
  const IndexQuery query = this->query(row);
  scores_.resize(visible);
  context_.compute.threads().parallel_for(visible, 256, [&](Range range) {
    for (std::size_t group = range.begin; group < range.end;) {
      const CompressedCache::KeyRun run = cache.keys(group, range.end - group);
      context_.compute.ops().index_scores(query, run.codes, run.scales, run.groups, scores_.data() + group);
      group += run.groups;
    }
  });
}

void IndexSelection::choose_candidates(std::vector<std::uint32_t>& candidates) {
  const ModelConfig& config = context_.config;
  select_blocks(scores_, config.candidate_block_size, config.candidate_topk_blocks, block_mask_);
  candidates.clear();
  for (std::size_t block = 0; block < block_mask_.size(); ++block)
    if (block_mask_[block] != 0) candidates.push_back(static_cast<std::uint32_t>(block));
}

// Scores outside the candidate blocks are -infinity by definition, so they are not computed at all: the
// scores of the candidates stand side by side, ascending, and the ties keep their order.
void IndexSelection::score_candidates(const CompressedCache& cache, std::size_t row, std::size_t visible,
                                      const std::vector<std::uint32_t>& candidates,
                                      std::vector<std::int32_t>& selected) {
  const ModelConfig& config = context_.config;
  const std::size_t block_size = config.candidate_block_size;
  const IndexQuery query = this->query(row);
  if (candidates.empty()) {
    selected.clear();
    return;
  }
  // All candidate blocks are full but possibly the newest one.
  const std::size_t last_size = std::min(block_size, visible - candidates.back() * block_size);
  scores_.resize((candidates.size() - 1) * block_size + last_size);
  context_.compute.threads().parallel_for(candidates.size(), 32, [&](Range range) {
    for (std::size_t i = range.begin; i < range.end; ++i) {
      const std::size_t start = candidates[i] * block_size;
      const std::size_t end = std::min(start + block_size, visible);
      for (std::size_t group = start; group < end;) {
        const CompressedCache::KeyRun run = cache.keys(group, end - group);
        context_.compute.ops().index_scores(query, run.codes, run.scales, run.groups,
                                            scores_.data() + i * block_size + (group - start));
        group += run.groups;
      }
    }
  });
  select_groups(scores_, config.index_topk, {}, 1, selected);
  for (std::int32_t& group : selected) {
    const auto slot = static_cast<std::size_t>(group);
    group = static_cast<std::int32_t>(candidates[slot / block_size] * block_size + slot % block_size);
  }
}

}  // namespace dsv41
