// CPU kernel of dsv4_npu::gather_accepted_slots; the rule stands in dsv4_npu/ops/gather_accepted_slots.
#include <algorithm>
#include <tuple>

#include "ops/accept.h"

namespace dsv4 {
namespace {

template <typename T>
void gather(const T* slots, T* tgt, T* src, const Accepted& accepted) {
  std::fill(tgt, tgt + accepted.batch * accepted.most, T(-1));
  std::fill(src, src + accepted.batch * accepted.most, T(-1));
  for (int64_t b = 0; b < accepted.batch; ++b) {
    for (int64_t k = 0; k < accepted.lens[b]; ++k) {
      tgt[b * accepted.most + k] = slots[b * accepted.width + k];
      src[b * accepted.most + k] = slots[accepted.row(b, k)];
    }
  }
}

std::tuple<Tensor, Tensor> gather_accepted_slots(const Tensor& out_cache_loc, const Tensor& accept_index,
                                                 const Tensor& accept_lens) {
  STD_TORCH_CHECK(out_cache_loc.dim() == 1 && out_cache_loc.is_contiguous(),
                  "out_cache_loc must be a contiguous [bs * D]");
  const Accepted accepted(accept_index, accept_lens, out_cache_loc.size(0));
  Tensor tgt = torch::stable::new_empty(out_cache_loc, {accepted.batch, accepted.most});
  Tensor src = torch::stable::new_empty(out_cache_loc, {accepted.batch, accepted.most});
  if (out_cache_loc.scalar_type() == ScalarType::Long) {
    gather(static_cast<const int64_t*>(out_cache_loc.const_data_ptr()), static_cast<int64_t*>(tgt.mutable_data_ptr()),
           static_cast<int64_t*>(src.mutable_data_ptr()), accepted);
  } else {
    STD_TORCH_CHECK(out_cache_loc.scalar_type() == ScalarType::Int, "out_cache_loc must be int32 or int64");
    gather(static_cast<const int32_t*>(out_cache_loc.const_data_ptr()), static_cast<int32_t*>(tgt.mutable_data_ptr()),
           static_cast<int32_t*>(src.mutable_data_ptr()), accepted);
  }
  return {tgt, src};
}

}  // namespace
}  // namespace dsv4

STABLE_TORCH_LIBRARY_IMPL(dsv4_npu, CPU, m) {
  m.impl("gather_accepted_slots", TORCH_BOX(&dsv4::gather_accepted_slots));
}
