// dsv41-bench prefill: chunks of a long prompt at full geometry, with and without the layer-rows that
// RowPlan leaves out, beside decoding. A whole prompt takes too long to repeat, so two kinds of chunks in its
// middle are timed, and the prompt's time is put together from the layer-rows that each of its chunks runs.
#include <cstdio>

#include "benchmarks/step_runner.h"

namespace dsv41::bench {
namespace {

struct Chunk {
  StepCost cost;
  double layer_rows = 0;  // rows times layers computed
};

/// The best of two runs of the chunk that follows `context` tokens. prompt_end 0: nothing is left out.
Chunk measure(StepRunner& runner, std::uint32_t context, std::size_t rows, std::uint32_t prompt_end) {
  Sequence sequence = runner.sequence(context);
  Chunk best;
  best.cost.seconds = 1e300;
  for (int i = 0; i < 2; ++i) {
    Sequence fork = sequence;
    Step step;
    step.add(fork, runner.tokens(rows), 0, prompt_end);
    const std::uint64_t before = runner.backbone().row_counts().computed;
    Chunk chunk{runner.forward(step, StepKind::Prefill), 0};
    chunk.layer_rows = static_cast<double>(runner.backbone().row_counts().computed - before);
    if (chunk.cost.seconds < best.cost.seconds) best = chunk;
  }
  return best;
}

/// Layer-rows of the chunk [start, start + rows) of a prompt of `length` tokens with skipping.
double planned(const ModelConfig& config, const RowPlan& plan, std::size_t start, std::size_t rows,
               std::size_t length) {
  double count = 0;
  for (std::uint32_t layer = 0; layer < config.n_layers; ++layer)
    for (std::size_t position = start; position < std::min(start + rows, length); ++position)
      count +=
          plan.needed(layer, static_cast<std::uint32_t>(position), static_cast<std::uint32_t>(length - 1));
  return count;
}

}  // namespace

Json run_prefill(const Options& options) {
  SyntheticModel model(options.config, options.pool_mib << 20);
  const ModelConfig& config = model.config();
  const RowPlan plan(config, config.n_mtp_layers > 0);
  Json results = Json::array();
  for (const std::size_t threads : thread_counts(options))
    for (const std::size_t rows : options.rows.empty() ? std::vector<std::size_t>{128} : options.rows)
      for (const std::size_t length : options.prompts) {
        if (length < 2 * rows || length > config.max_positions())
          throw std::invalid_argument("--prompts " + std::to_string(length) +
                                      " must hold two chunks and fit the model");
        StepRunner runner(model, options, threads, rows, 1);
        const auto middle = static_cast<std::uint32_t>((length - rows) / 2);
        const Chunk whole = measure(runner, middle, rows, 0);
        const Chunk part = measure(runner, middle, rows, static_cast<std::uint32_t>(length));
        // Both kinds share what every token needs; the difference lies in the layer-rows.
        const double per_layer_row =
            (whole.cost.seconds - part.cost.seconds) / std::max(1.0, whole.layer_rows - part.layer_rows);
        double skipping = 0, everything = 0, planned_rows = 0;
        for (std::size_t start = 0; start < length; start += rows) {
          const double share =
              static_cast<double>(std::min(rows, length - start)) / static_cast<double>(rows);
          const double here = planned(config, plan, start, rows, length);
          planned_rows += here;
          everything += whole.cost.seconds * share;
          skipping += whole.cost.seconds * share - per_layer_row * (whole.layer_rows * share - here);
        }
        const auto tokens = static_cast<double>(length);
        std::fprintf(stderr,
                     "prompt %7zu  chunk %4zu  threads %zu  %7.2f tokens/s, %7.2f without skipping: %.2f x\n",
                     length, rows, threads, tokens / skipping, tokens / everything, everything / skipping);
        results.push_back(
            {{"prompt_tokens", length},
             {"chunk", rows},
             {"threads", threads},
             {"chunk_s", whole.cost.seconds},
             {"chunk_phases_ms", phases_json(whole.cost)},
             {"skipping_chunk_s", part.cost.seconds},
             {"skipping_chunk_phases_ms", phases_json(part.cost)},
             {"layer_rows_of_prompt", planned_rows},
             {"layer_rows_without_skipping", tokens * config.n_layers},
             {"tokens_per_s", tokens / skipping},
             {"tokens_per_s_without_skipping", tokens / everything},
             {"times_faster", everything / skipping},
             {"how", "two chunks in the middle timed, the prompt put together from their layer-rows"}});
      }
  return results;
}

}  // namespace dsv41::bench
