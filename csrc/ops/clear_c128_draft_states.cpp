// CPU kernel of dsv4_npu::clear_c128_draft_states_; the rule stands in dsv4_npu/ops/clear_c128_draft_states.
#include "ops/state_rows.h"

namespace dsv4 {
namespace {

void clear_c128_draft_states_(const Tensor& state, const Tensor& req_pool_indices, const Tensor& seq_lens,
                              const Tensor& accept_lens, int64_t ring_size, int64_t num_draft_tokens) {
  const Indices request(req_pool_indices, "req_pool_indices");
  const Indices seq_len(seq_lens, "seq_lens");
  const Indices accepted(accept_lens, "accept_lens");
  STD_TORCH_CHECK(seq_len.size() == request.size() && accepted.size() == request.size(),
                  "req_pool_indices, seq_lens and accept_lens must have one entry per request");
  STD_TORCH_CHECK(ring_size >= 1, "ring_size must be at least 1");
  std::vector<int64_t> rows;
  for (int64_t b = 0; b < request.size(); ++b) {
    STD_TORCH_CHECK(request[b] >= 0 && seq_len[b] >= 0 && accepted[b] >= 0,
                    "req_pool_indices, seq_lens and accept_lens must not be negative");
    for (int64_t offset = accepted[b]; offset < num_draft_tokens; ++offset) {
      rows.push_back(request[b] * ring_size + (seq_len[b] + offset) % ring_size);
    }
  }
  empty_rows(state, rows);
}

}  // namespace
}  // namespace dsv4

STABLE_TORCH_LIBRARY_IMPL(dsv4_npu, CPU, m) {
  m.impl("clear_c128_draft_states_", TORCH_BOX(&dsv4::clear_c128_draft_states_));
}
