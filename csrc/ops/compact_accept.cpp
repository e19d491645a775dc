// CPU kernel of dsv4_npu::compact_accept_; the rule stands in dsv4_npu/ops/compact_accept.
#include <cstring>
#include <optional>
#include <vector>

#include "ops/accept.h"

namespace dsv4 {
namespace {

void compact(char* base, int64_t row_bytes, const Accepted& accepted) {
  torch::stable::parallel_for(0, accepted.batch, grain(accepted.most * row_bytes), [&](int64_t begin, int64_t end) {
    std::vector<char> copies(static_cast<size_t>(accepted.most * row_bytes));
    for (int64_t b = begin; b < end; ++b) {
      const int64_t count = accepted.lens[b];
      for (int64_t k = 0; k < count; ++k) {
        std::memcpy(copies.data() + k * row_bytes, base + accepted.row(b, k) * row_bytes, row_bytes);
      }
      std::memcpy(base + b * accepted.width * row_bytes, copies.data(), count * row_bytes);
    }
  });
}

void compact_accept_(const Tensor& predict, const std::optional<Tensor>& hidden_states, const Tensor& accept_index,
                     const Tensor& accept_lens) {
  STD_TORCH_CHECK(predict.dim() == 1 && predict.is_contiguous(), "predict must be a contiguous [bs * D]");
  const Accepted accepted(accept_index, accept_lens, predict.size(0));
  if (hidden_states.has_value()) {
    STD_TORCH_CHECK(hidden_states->dim() == 2 && hidden_states->is_contiguous() &&
                        hidden_states->size(0) == predict.size(0),
                    "hidden_states must be a contiguous [bs * D, H]");
  }
  if (accepted.batch == 0) return;
  compact(static_cast<char*>(predict.mutable_data_ptr()), static_cast<int64_t>(predict.element_size()), accepted);
  if (hidden_states.has_value() && hidden_states->numel() > 0) {
    const int64_t row_bytes = hidden_states->size(1) * static_cast<int64_t>(hidden_states->element_size());
    compact(static_cast<char*>(hidden_states->mutable_data_ptr()), row_bytes, accepted);
  }
}

}  // namespace
}  // namespace dsv4

STABLE_TORCH_LIBRARY_IMPL(dsv4_npu, CPU, m) { m.impl("compact_accept_", TORCH_BOX(&dsv4::compact_accept_)); }
