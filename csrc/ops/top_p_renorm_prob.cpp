// CPU kernel of dsv4_npu::top_p_renorm_prob; the rule stands in dsv4_npu/ops/top_p_renorm_prob.
#include "ops/renorm.h"

namespace dsv4 {
namespace {

Tensor top_p_renorm_prob(const Tensor& probs, const Tensor& top_p) {
  STD_TORCH_CHECK(probs.dim() == 2, "probs must be [bs, V]");
  const float* mass = read<float>(top_p, "top_p", {probs.size(0)});
  return renorm(probs, [&](int64_t row, const float* p, std::vector<int32_t>& tokens) {
    if (mass[row] >= 1) return;
    std::sort(tokens.begin(), tokens.end(), Likelier{p});
    double before = 0;
    size_t kept = 0;
    while (kept < tokens.size() && (kept == 0 || before < mass[row])) before += p[tokens[kept++]];
    tokens.resize(kept);
  });
}

}  // namespace
}  // namespace dsv4

STABLE_TORCH_LIBRARY_IMPL(dsv4_npu, CPU, m) {
  m.impl("top_p_renorm_prob", TORCH_BOX(&dsv4::top_p_renorm_prob));
}
