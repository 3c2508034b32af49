#include "runtime/moe.h"

#include <algorithm>

namespace dsv41 {

Moe::Moe(const ModelContext& context, Experts& experts) : context_(context), experts_(experts) {
  const ModelConfig& config = context.config;
  const std::size_t rows = context.max_rows, dim = config.dim, inner = config.moe_inter_dim;
  const std::size_t most_experts = std::max(config.n_routed_experts, config.dspark_n_routed_experts);
  const std::size_t most_chosen = std::max(config.n_activated_experts, config.dspark_n_activated_experts);
  logits_.resize(rows * most_experts);
  scores_.resize(rows * most_experts);
  ids_.resize(rows * most_chosen);
  weights_.resize(rows * most_chosen);
  gate_.resize(rows * inner * config.n_shared_experts);
  up_.resize(gate_.size());
  hidden_codes_.resize(gate_.size());
  hidden_scales_.resize(gate_.size() / kBlock);
  routed_.resize(rows * most_chosen * dim);
}

Moe::Call Moe::make_call() const {
  const std::size_t rows = context_.max_rows, dim = context_.config.dim;
  Call call;
  call.routes.reserve(
      rows * std::max(context_.config.n_activated_experts, context_.config.dspark_n_activated_experts));
  call.codes.resize(rows * dim);
  call.scales.resize(rows * dim / kBlock);
  call.shared.resize(rows * dim);
  return call;
}

void Moe::begin(std::uint64_t step, std::uint32_t block, const MoeWeights& weights,
                std::span<const BFloat16> x, std::size_t rows, Call& call,
                std::span<const std::uint32_t> origins) {
  const std::size_t dim = context_.config.dim;
  call.rows = rows;
  route(block, weights, x, call);
  if (context_.recorder) context_.recorder->routes(block, call.routes, origins);
  const QuantizedRows quantized{call.codes.data(), call.scales.data(), rows, dim};
  {
    PhaseTimer timer(context_.recorder, Phase::ExchangeSend);
    context_.compute.quantize_rows(x, dim, call.codes, call.scales);
    experts_.begin({step, block, quantized, call.routes});
  }
  shared_expert(quantized, weights, first(call.shared, rows * dim));
}

void Moe::finish(std::uint32_t block, Call& call, std::span<BFloat16> out) {
  const std::size_t dim = context_.config.dim, chosen = context_.config.experts_per_token(block);
  PhaseTimer timer(context_.recorder, Phase::ExchangeWait);
  experts_.finish(first(routed_, call.routes.size() * dim));
  if (context_.recorder) context_.recorder->exchange(block, experts_.reports());
  context_.compute.threads().parallel_for(call.rows, 1, [&](Range range) {
    for (std::size_t row = range.begin; row < range.end; ++row)
      context_.compute.ops().sum_experts(routed_.data() + row * chosen * dim, chosen,
                                         call.shared.data() + row * dim, dim, out.data() + row * dim);
  });
}

void Moe::route(std::uint32_t block, const MoeWeights& weights, std::span<const BFloat16> x, Call& call) {
  PhaseTimer timer(context_.recorder, Phase::Routing);
  const std::size_t experts = context_.config.experts_of(block),
                    chosen = context_.config.experts_per_token(block);
  const std::size_t rows = call.rows;
  context_.compute.linear_wide(x, weights.gate, first(logits_, rows * experts));
  context_.compute.threads().parallel_for(rows * experts, 64, [&](Range range) {
    gate_scores(std::span(logits_).subspan(range.begin, range.size()),
                std::span(scores_).subspan(range.begin, range.size()));
  });
  call.routes.clear();
  for (std::size_t row = 0; row < rows; ++row) {
    const std::span<std::int32_t> ids(ids_.data() + row * chosen, chosen);
    const std::span<float> row_weights(weights_.data() + row * chosen, chosen);
    choose_experts({scores_.data() + row * experts, experts}, weights.bias,
                   static_cast<float>(context_.config.route_scale), ids, row_weights);
    for (std::size_t i = 0; i < chosen; ++i)
      call.routes.push_back(
          {static_cast<std::uint32_t>(row), static_cast<std::uint32_t>(ids[i]), row_weights[i]});
    std::sort(call.routes.end() - static_cast<std::ptrdiff_t>(chosen), call.routes.end(),
              [](const Route& a, const Route& b) { return a.expert < b.expert; });
  }
  context_.observe<float>("gate.scores", static_cast<int>(block), first(scores_, rows * experts));
  context_.observe<std::int32_t>("gate.ids", static_cast<int>(block), first(ids_, rows * chosen));
  context_.observe<float>("gate.weights", static_cast<int>(block), first(weights_, rows * chosen));
}

void Moe::shared_expert(const QuantizedRows& x, const MoeWeights& weights, std::span<BFloat16> out) {
  PhaseTimer timer(context_.recorder, Phase::SharedExpert);
  const std::size_t inner = weights.shared_w1.n, count = x.rows * inner;
  context_.compute.linear(x, weights.shared_w1, first(gate_, count));
  context_.compute.linear(x, weights.shared_w3, first(up_, count));
  context_.compute.threads().parallel_for(count, 4096, [&](Range range) {
    context_.compute.ops().swiglu(gate_.data() + range.begin, up_.data() + range.begin, 1.0f,
                                  static_cast<float>(context_.config.swiglu_limit), range.size(),
                                  gate_.data() + range.begin);
  });
  context_.compute.quantize_rows(first(gate_, count), inner, hidden_codes_, hidden_scales_);
  context_.compute.linear(QuantizedRows{hidden_codes_.data(), hidden_scales_.data(), x.rows, inner},
                          weights.shared_w2, out);
}

}  // namespace dsv41
