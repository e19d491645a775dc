// CPU kernel of dsv4_npu::chain_speculative_sampling; the rule stands in dsv4_npu/ops/chain_speculative_sampling.
#include "ops/sampling.h"

namespace dsv4 {
namespace {

void chain_speculative_sampling(const Tensor& predicts, const Tensor& accept_index, const Tensor& accept_token_num,
                                const Tensor& candidates, const Tensor& retrieve_index, const Tensor& uniform_samples,
                                const Tensor& uniform_samples_for_final_sampling, const Tensor& target_probs,
                                const Tensor& draft_probs) {
  const Verify verify(predicts, accept_index, accept_token_num, candidates, retrieve_index);
  const int64_t drafts = verify.drafts, judged = std::min(drafts, verify.width) - 1;
  const auto* target = read<float>(target_probs, "target_probs", {verify.batch, drafts, -1});
  const int64_t vocab = target_probs.size(2);
  const auto* draft = read<float>(draft_probs, "draft_probs", {verify.batch, -1, vocab});
  const auto* coins = read<float>(uniform_samples, "uniform_samples", {verify.batch, -1});
  const auto* last_coins = read<float>(uniform_samples_for_final_sampling, "uniform_samples_for_final_sampling",
                                       {verify.batch});
  const int64_t draft_rows = draft_probs.size(1), coin_stride = uniform_samples.size(1);
  STD_TORCH_CHECK(draft_rows >= judged, "draft_probs has fewer rows than drafts are judged");
  STD_TORCH_CHECK(coin_stride >= judged, "uniform_samples has fewer columns than drafts are judged");
  torch::stable::parallel_for(0, verify.batch, grain(2 * vocab * sizeof(float)), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      Verify::Path path(verify, b);
      int64_t step = 1;
      bool rejected = false;
      for (; step <= judged; ++step) {
        const int64_t token = verify.candidates[b * drafts + step];
        if (token < 0 || token >= vocab) break;
        const float p = target[(b * drafts + step - 1) * vocab + token];
        const float q = draft[(b * draft_rows + step - 1) * vocab + token];
        const float bound = coins[b * coin_stride + step - 1] * q;
        if (!(q > 0 && bound < p)) {
          rejected = true;
          break;
        }
        path.accept(step);
      }
      const float* p = target + (b * drafts + step - 1) * vocab;
      int64_t token = -1;
      if (rejected) {
        const float* q = draft + (b * draft_rows + step - 1) * vocab;
        token = draw(vocab, last_coins[b], [=](int64_t t) { return std::max(positive(p[t]) - positive(q[t]), 0.0); });
      }
      if (token < 0) token = draw(vocab, last_coins[b], [=](int64_t t) { return positive(p[t]); });
      path.finish(token);
    }
  });
}

}  // namespace
}  // namespace dsv4

STABLE_TORCH_LIBRARY_IMPL(dsv4_npu, CPU, m) {
  m.impl("chain_speculative_sampling", TORCH_BOX(&dsv4::chain_speculative_sampling));
}
