// CPU kernel of dsv4_npu::tree_speculative_sampling_target_only; the rule stands in the op's folder in dsv4_npu/ops.
#include <algorithm>
#include <vector>

#include "ops/sampling.h"

namespace dsv4 {
namespace {

constexpr double kMinThresholdAcc = 1e-9;

void tree_speculative_sampling_target_only(const Tensor& predicts, const Tensor& accept_index,
                                           const Tensor& accept_token_num, const Tensor& candidates,
                                           const Tensor& retrieve_index, const Tensor& retrieve_next_token,
                                           const Tensor& retrieve_next_sibling, const Tensor& uniform_samples,
                                           const Tensor& uniform_samples_for_final_sampling,
                                           const Tensor& target_probs, double threshold_single,
                                           double threshold_acc) {
  const Verify verify(predicts, accept_index, accept_token_num, candidates, retrieve_index);
  const int64_t drafts = verify.drafts;
  const auto* children = read<int64_t>(retrieve_next_token, "retrieve_next_token", {verify.batch, drafts});
  const auto* siblings = read<int64_t>(retrieve_next_sibling, "retrieve_next_sibling", {verify.batch, drafts});
  const auto* target = read<float>(target_probs, "target_probs", {verify.batch, drafts, -1});
  const auto* coins = read<float>(uniform_samples, "uniform_samples", {verify.batch, -1});
  const auto* last_coins = read<float>(uniform_samples_for_final_sampling, "uniform_samples_for_final_sampling",
                                       {verify.batch});
  const int64_t vocab = target_probs.size(2), coin_stride = uniform_samples.size(1);
  STD_TORCH_CHECK(coin_stride >= drafts, "uniform_samples has fewer columns than there are nodes");
  const float single = static_cast<float>(threshold_single);
  const float scale = static_cast<float>(std::max(threshold_acc, kMinThresholdAcc));
  torch::stable::parallel_for(0, verify.batch, grain(vocab * sizeof(float)), [&](int64_t begin, int64_t end) {
    std::vector<int64_t> tried;
    for (int64_t b = begin; b < end; ++b) {
      Verify::Path path(verify, b);
      int64_t parent = 0, node = children[b * drafts];
      float reached = 0;
      tried.clear();
      for (int64_t seen = 0; seen < drafts && node >= 0 && node < drafts && !path.full(); ++seen) {
        const int64_t token = verify.candidates[b * drafts + node];
        bool taken = false;
        if (token >= 0 && token < vocab && std::find(tried.begin(), tried.end(), token) == tried.end()) {
          tried.push_back(token);
          const float p = target[(b * drafts + parent) * vocab + token];
          if (p > 0) {
            reached += p;
            // coin < reached / threshold, without a division whose rounding differs between devices
            const float bound = coins[b * coin_stride + parent] * scale;
            taken = bound < reached || p >= single;
          }
        }
        if (taken) {
          path.accept(node);
          parent = node;
          node = children[b * drafts + node];
          reached = 0;
          tried.clear();
        } else {
          node = siblings[b * drafts + node];
        }
      }
      std::sort(tried.begin(), tried.end());
      const float* p = target + (b * drafts + parent) * vocab;
      int64_t token = draw(vocab, last_coins[b], [&](int64_t t) {
        return std::binary_search(tried.begin(), tried.end(), t) ? 0.0 : positive(p[t]);
      });
      if (token < 0) token = draw(vocab, last_coins[b], [=](int64_t t) { return positive(p[t]); });
      path.finish(token);
    }
  });
}

}  // namespace
}  // namespace dsv4

STABLE_TORCH_LIBRARY_IMPL(dsv4_npu, CPU, m) {
  m.impl("tree_speculative_sampling_target_only", TORCH_BOX(&dsv4::tree_speculative_sampling_target_only));
}
