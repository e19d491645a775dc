// A slab of compressor states: [layers, rows, 2 D], a row = D values (kv) and D scores. The empty row is kv 0,
// score -inf.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "ops/common.h"

namespace dsv4 {

// Writes the empty row at each of `rows`, in every layer.
template <typename T>
void empty_rows(T* state, int64_t layers, int64_t rows_per_layer, int64_t width, const std::vector<int64_t>& rows) {
  const int64_t count = static_cast<int64_t>(rows.size());
  if (count == 0 || layers == 0) return;
  const int64_t half = width / 2;
  torch::stable::parallel_for(0, layers * count, grain(width * sizeof(T)), [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      T* row = state + ((item / count) * rows_per_layer + rows[item % count]) * width;
      std::fill(row, row + half, T(0));
      std::fill(row + half, row + width, -std::numeric_limits<T>::infinity());
    }
  });
}

inline void empty_rows(const Tensor& state, const std::vector<int64_t>& rows) {
  STD_TORCH_CHECK(state.dim() == 3 && state.is_contiguous(), "state must be a contiguous [layers, rows, 2 D]");
  STD_TORCH_CHECK(state.size(2) % 2 == 0, "state rows must have an even number of elements");
  for (int64_t row : rows) {
    STD_TORCH_CHECK(row >= 0 && row < state.size(1), "row ", row, " is outside the state of ", state.size(1), " rows");
  }
  if (state.scalar_type() == ScalarType::Float) {
    empty_rows(static_cast<float*>(state.mutable_data_ptr()), state.size(0), state.size(1), state.size(2), rows);
  } else {
    STD_TORCH_CHECK(state.scalar_type() == ScalarType::Double, "state must be float32 or float64");
    empty_rows(static_cast<double*>(state.mutable_data_ptr()), state.size(0), state.size(1), state.size(2), rows);
  }
}

}  // namespace dsv4
