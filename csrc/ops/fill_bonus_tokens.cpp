// CPU kernel of dsv4_npu::fill_bonus_tokens_; the rule stands in dsv4_npu/ops/fill_bonus_tokens.
#include "ops/accept.h"

namespace dsv4 {
namespace {

void fill_bonus_tokens_(const Tensor& bonus_tokens, const Tensor& predict, const Tensor& accept_index,
                        const Tensor& accept_lens) {
  STD_TORCH_CHECK(bonus_tokens.dim() == 1 && bonus_tokens.is_contiguous(), "bonus_tokens must be a contiguous [bs]");
  const Indices token(predict, "predict");
  const Accepted accepted(accept_index, accept_lens, token.size());
  STD_TORCH_CHECK(bonus_tokens.size(0) == accepted.batch, "bonus_tokens must have one entry per request");
  const bool wide = bonus_tokens.scalar_type() == ScalarType::Long;
  STD_TORCH_CHECK(wide || bonus_tokens.scalar_type() == ScalarType::Int, "bonus_tokens must be int32 or int64");
  void* const out = bonus_tokens.mutable_data_ptr();
  for (int64_t b = 0; b < accepted.batch; ++b) {
    const int64_t bonus = token[accepted.row(b, accepted.lens[b] - 1)];
    if (wide) {
      static_cast<int64_t*>(out)[b] = bonus;
    } else {
      static_cast<int32_t*>(out)[b] = static_cast<int32_t>(bonus);
    }
  }
}

}  // namespace
}  // namespace dsv4

STABLE_TORCH_LIBRARY_IMPL(dsv4_npu, CPU, m) { m.impl("fill_bonus_tokens_", TORCH_BOX(&dsv4::fill_bonus_tokens_)); }
