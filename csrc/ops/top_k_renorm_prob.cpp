// CPU kernel of dsv4_npu::top_k_renorm_prob; the rule stands in dsv4_npu/ops/top_k_renorm_prob.
#include "ops/renorm.h"

namespace dsv4 {
namespace {

Tensor top_k_renorm_prob(const Tensor& probs, const Tensor& top_k) {
  const Indices limit(top_k, "top_k");
  STD_TORCH_CHECK(probs.dim() == 2 && limit.size() == probs.size(0), "top_k must have one entry per row of probs");
  const int64_t vocab = probs.size(1);
  return renorm(probs, [&](int64_t row, const float* p, std::vector<int32_t>& tokens) {
    const int64_t k = limit[row];
    if (k <= 0 || k >= static_cast<int64_t>(tokens.size()) || k >= vocab) return;
    std::nth_element(tokens.begin(), tokens.begin() + k, tokens.end(), Likelier{p});
    tokens.resize(k);
  });
}

}  // namespace
}  // namespace dsv4

STABLE_TORCH_LIBRARY_IMPL(dsv4_npu, CPU, m) {
  m.impl("top_k_renorm_prob", TORCH_BOX(&dsv4::top_k_renorm_prob));
}
