// What the ops that consume a verify's result share: accept_index [bs, W] of verify rows b * D + j, valid by length.
#pragma once

#include "ops/common.h"

namespace dsv4 {

struct Accepted {
  Indices index;
  Indices lens;
  int64_t batch;
  int64_t width;  // D, verify rows per request
  int64_t most;   // W

  // `rows` = bs * D, the rows of the tensor that the indices point into.
  Accepted(const Tensor& accept_index, const Tensor& accept_lens, int64_t rows)
      : index(accept_index, "accept_index"), lens(accept_lens, "accept_lens") {
    STD_TORCH_CHECK(accept_index.dim() == 2, "accept_index must be [bs, W]");
    batch = accept_index.size(0);
    most = accept_index.size(1);
    width = batch == 0 ? 1 : rows / batch;
    STD_TORCH_CHECK(rows == batch * width, "the verify rows must be bs * D");
    STD_TORCH_CHECK(lens.size() == batch, "accept_lens must have one entry per request");
    for (int64_t b = 0; b < batch; ++b) {
      STD_TORCH_CHECK(lens[b] >= 1 && lens[b] <= most && lens[b] <= width, "accept_lens of request ", b, " is ",
                      lens[b]);
      for (int64_t k = 0; k < lens[b]; ++k) {
        STD_TORCH_CHECK(row(b, k) >= b * width && row(b, k) < (b + 1) * width, "accept_index of request ", b,
                        " holds ", row(b, k), ", a row that is not its own");
      }
    }
  }

  int64_t row(int64_t b, int64_t k) const { return index[b * most + k]; }
};

}  // namespace dsv4
