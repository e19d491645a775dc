// CPU kernel of dsv4_npu::clear_request_states_; the rule stands in dsv4_npu/ops/clear_request_states.
#include "ops/state_rows.h"

namespace dsv4 {
namespace {

void clear_request_states_(const Tensor& state, const Tensor& req_pool_indices, int64_t ring_size) {
  const Indices request(req_pool_indices, "req_pool_indices");
  STD_TORCH_CHECK(ring_size >= 1, "ring_size must be at least 1");
  std::vector<int64_t> rows;
  rows.reserve(static_cast<size_t>(request.size() * ring_size));
  for (int64_t b = 0; b < request.size(); ++b) {
    for (int64_t row = 0; row < ring_size; ++row) rows.push_back(request[b] * ring_size + row);
  }
  empty_rows(state, rows);
}

}  // namespace
}  // namespace dsv4

STABLE_TORCH_LIBRARY_IMPL(dsv4_npu, CPU, m) {
  m.impl("clear_request_states_", TORCH_BOX(&dsv4::clear_request_states_));
}
