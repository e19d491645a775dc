// CPU kernel of dsv4_npu::verify_tree_greedy; the rule stands in dsv4_npu/ops/verify_tree_greedy.
#include "ops/sampling.h"

namespace dsv4 {
namespace {

void verify_tree_greedy(const Tensor& predicts, const Tensor& accept_index, const Tensor& accept_token_num,
                        const Tensor& candidates, const Tensor& retrieve_index, const Tensor& retrieve_next_token,
                        const Tensor& retrieve_next_sibling, const Tensor& target_predict) {
  const Verify verify(predicts, accept_index, accept_token_num, candidates, retrieve_index);
  const int64_t drafts = verify.drafts;
  const auto* children = read<int64_t>(retrieve_next_token, "retrieve_next_token", {verify.batch, drafts});
  const auto* siblings = read<int64_t>(retrieve_next_sibling, "retrieve_next_sibling", {verify.batch, drafts});
  const auto* targets = read<int64_t>(target_predict, "target_predict", {verify.batch, drafts});
  torch::stable::parallel_for(0, verify.batch, grain(4 * drafts * sizeof(int64_t)), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      Verify::Path path(verify, b);
      int64_t node = children[b * drafts];
      for (int64_t seen = 0; seen < drafts && node >= 0 && node < drafts && !path.full(); ++seen) {
        if (verify.candidates[b * drafts + node] == targets[path.row()]) {
          path.accept(node);
          node = children[b * drafts + node];
        } else {
          node = siblings[b * drafts + node];
        }
      }
      path.finish(targets[path.row()]);
    }
  });
}

}  // namespace
}  // namespace dsv4

STABLE_TORCH_LIBRARY_IMPL(dsv4_npu, CPU, m) {
  m.impl("verify_tree_greedy", TORCH_BOX(&dsv4::verify_tree_greedy));
}
