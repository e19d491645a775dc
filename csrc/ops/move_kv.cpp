// CPU kernel of dsv4_npu::move_kv_; the rule stands in dsv4_npu/ops/move_kv.
#include <cstring>
#include <vector>

#include "ops/common.h"

namespace dsv4 {
namespace {

void move_kv_(const Tensor& slab, const Tensor& tgt, const Tensor& src) {
  STD_TORCH_CHECK(slab.dim() == 5 && slab.is_contiguous(),
                  "slab must be a contiguous [layers, pages, page, heads, row]");
  const Indices target(tgt, "tgt");
  const Indices source(src, "src");
  STD_TORCH_CHECK(target.size() == source.size(), "tgt and src must have the same number of entries");
  const int64_t slots = slab.size(1) * slab.size(2);
  const int64_t row = slab.size(3) * slab.size(4) * static_cast<int64_t>(slab.element_size());
  std::vector<std::pair<int64_t, int64_t>> moves;
  for (int64_t i = 0; i < target.size(); ++i) {
    if (target[i] == -1 && source[i] == -1) continue;
    STD_TORCH_CHECK(target[i] >= 0 && target[i] < slots && source[i] >= 0 && source[i] < slots, "pair ", i, " (",
                    target[i], ", ", source[i], ") is outside the slab of ", slots, " slots");
    moves.emplace_back(target[i], source[i]);
  }
  if (moves.empty() || slab.numel() == 0) return;

  char* const base = static_cast<char*>(slab.mutable_data_ptr());
  const int64_t count = static_cast<int64_t>(moves.size());
  torch::stable::parallel_for(0, slab.size(0), grain(2 * count * row), [&](int64_t begin, int64_t end) {
    std::vector<char> copies(static_cast<size_t>(count * row));
    for (int64_t layer = begin; layer < end; ++layer) {
      char* const rows = base + layer * slots * row;
      for (int64_t i = 0; i < count; ++i) std::memcpy(copies.data() + i * row, rows + moves[i].second * row, row);
      for (int64_t i = 0; i < count; ++i) std::memcpy(rows + moves[i].first * row, copies.data() + i * row, row);
    }
  });
}

}  // namespace
}  // namespace dsv4

STABLE_TORCH_LIBRARY_IMPL(dsv4_npu, CPU, m) { m.impl("move_kv_", TORCH_BOX(&dsv4::move_kv_)); }
