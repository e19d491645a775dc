// CPU kernel of dsv4_npu::extend_slots; the rule stands in dsv4_npu/ops/extend_slots.
#include <algorithm>
#include <tuple>
#include <vector>

#include "ops/common.h"

namespace dsv4 {
namespace {

std::tuple<Tensor, Tensor> extend_slots(const Tensor& block_table, const Tensor& req_pool_indices,
                                        const Tensor& starts, const Tensor& lengths, int64_t page_size, int64_t total,
                                        int64_t columns) {
  STD_TORCH_CHECK(block_table.dim() == 2 && block_table.is_contiguous() &&
                      block_table.scalar_type() == ScalarType::Int,
                  "block_table must be a contiguous int32 [request rows, table columns]");
  STD_TORCH_CHECK(page_size >= 1 && columns >= 0 && columns <= block_table.size(1) && total >= 0,
                  "page_size, total or columns is out of range");
  const Indices request(req_pool_indices, "req_pool_indices");
  const Indices start(starts, "starts");
  const Indices length(lengths, "lengths");
  const int64_t batch = request.size();
  STD_TORCH_CHECK(start.size() == batch && length.size() == batch,
                  "req_pool_indices, starts and lengths must have one entry per request");
  std::vector<int64_t> first(static_cast<size_t>(batch) + 1, 0);
  for (int64_t b = 0; b < batch; ++b) {
    STD_TORCH_CHECK(request[b] >= 0 && request[b] < block_table.size(0), "req_pool_indices holds ", request[b]);
    STD_TORCH_CHECK(start[b] >= 0 && length[b] >= 0 && start[b] + length[b] <= columns * page_size, "request ", b,
                    " does not fit the columns");
    first[b + 1] = first[b] + length[b];
  }
  STD_TORCH_CHECK(first[batch] <= total, "total is less than the sum of lengths");

  Tensor slots = torch::stable::new_zeros(block_table, {total}, ScalarType::Long);
  Tensor tables = torch::stable::new_zeros(block_table, {batch, columns});
  const int32_t* const pages = static_cast<const int32_t*>(block_table.const_data_ptr());
  int64_t* const slot = static_cast<int64_t*>(slots.mutable_data_ptr());
  int32_t* const table = static_cast<int32_t*>(tables.mutable_data_ptr());
  const int64_t stride = block_table.size(1);
  for (int64_t b = 0; b < batch; ++b) {
    const int32_t* const row = pages + request[b] * stride;
    const int64_t end = start[b] + length[b];
    std::copy(row, row + (end + page_size - 1) / page_size, table + b * columns);
    int64_t position = start[b];
    for (int64_t at = first[b]; position < end;) {
      const int64_t base = row[position / page_size] * page_size;
      const int64_t page_end = std::min(end, (position / page_size + 1) * page_size);
      for (int64_t offset = position % page_size; position < page_end; ++position) slot[at++] = base + offset++;
    }
  }
  return {slots, tables};
}

}  // namespace
}  // namespace dsv4

STABLE_TORCH_LIBRARY_IMPL(dsv4_npu, CPU, m) { m.impl("extend_slots", TORCH_BOX(&dsv4::extend_slots)); }
