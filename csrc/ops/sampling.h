// What the CPU kernels of verification and sampling share: views that check their tensors, and the final draw.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <limits>

#include "ops/common.h"

namespace dsv4 {

// Pointers into a contiguous tensor of one of the types used here; checks dtype and sizes (-1: any).
template <typename T>
constexpr ScalarType kTypeOf = ScalarType::Undefined;
template <>
inline constexpr ScalarType kTypeOf<float> = ScalarType::Float;
template <>
inline constexpr ScalarType kTypeOf<int32_t> = ScalarType::Int;
template <>
inline constexpr ScalarType kTypeOf<int64_t> = ScalarType::Long;

template <typename T>
void check_view(const Tensor& tensor, const char* name, std::initializer_list<int64_t> sizes) {
  STD_TORCH_CHECK(tensor.scalar_type() == kTypeOf<T>, name, " has the wrong dtype");
  STD_TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous");
  STD_TORCH_CHECK(tensor.dim() == static_cast<int64_t>(sizes.size()), name, " has the wrong number of dimensions");
  int64_t axis = 0;
  for (int64_t size : sizes) {
    STD_TORCH_CHECK(size < 0 || tensor.size(axis) == size, name, " has the wrong size on axis ", axis);
    ++axis;
  }
}

template <typename T>
const T* read(const Tensor& tensor, const char* name, std::initializer_list<int64_t> sizes) {
  check_view<T>(tensor, name, sizes);
  return static_cast<const T*>(tensor.const_data_ptr());
}

template <typename T>
T* write(const Tensor& tensor, const char* name, std::initializer_list<int64_t> sizes) {
  check_view<T>(tensor, name, sizes);
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// The outputs of a verify, the rows of the nodes, and the path of one request through them.
struct Verify {
  Verify(const Tensor& predicts_, const Tensor& accept_index_, const Tensor& accept_token_num_,
         const Tensor& candidates_, const Tensor& retrieve_index_) {
    STD_TORCH_CHECK(candidates_.dim() == 2 && candidates_.size(1) >= 1, "candidates must be [bs, D] with D >= 1");
    STD_TORCH_CHECK(accept_index_.dim() == 2 && accept_index_.size(1) >= 1, "accept_index must be [bs, width >= 1]");
    batch = candidates_.size(0);
    drafts = candidates_.size(1);
    width = accept_index_.size(1);
    candidates = read<int64_t>(candidates_, "candidates", {batch, drafts});
    rows = read<int64_t>(retrieve_index_, "retrieve_index", {batch, drafts});
    predicts = write<int32_t>(predicts_, "predicts", {batch * drafts});
    accept_index = write<int32_t>(accept_index_, "accept_index", {batch, width});
    accept_token_num = write<int32_t>(accept_token_num_, "accept_token_num", {batch});
    for (int64_t i = 0; i < batch * drafts; ++i) {
      STD_TORCH_CHECK(rows[i] >= 0 && rows[i] < batch * drafts, "retrieve_index is out of range");
    }
  }

  class Path {
   public:
    Path(const Verify& verify, int64_t b) : verify_(verify), b_(b) { append(0); }
    bool full() const { return length_ == verify_.width; }
    int64_t row() const { return row_; }
    // The draft at `node` is accepted: its token follows the last row, its own row comes next.
    void accept(int64_t node) {
      emit(verify_.candidates[b_ * verify_.drafts + node]);
      append(node);
    }
    void emit(int64_t token) { verify_.predicts[row_] = static_cast<int32_t>(token); }
    // The last token, and the rest of accept_index, which arrives uninitialised.
    void finish(int64_t token) {
      emit(token);
      for (int64_t k = length_; k < verify_.width; ++k) verify_.accept_index[b_ * verify_.width + k] = -1;
      verify_.accept_token_num[b_] = static_cast<int32_t>(length_ - 1);
    }

   private:
    void append(int64_t node) {
      row_ = verify_.rows[b_ * verify_.drafts + node];
      verify_.accept_index[b_ * verify_.width + length_++] = static_cast<int32_t>(row_);
    }
    const Verify& verify_;
    int64_t b_, row_ = 0, length_ = 0;
  };

  int64_t batch = 0, drafts = 0, width = 0;
  const int64_t *candidates = nullptr, *rows = nullptr;
  int32_t *predicts = nullptr, *accept_index = nullptr, *accept_token_num = nullptr;
};

// Probability as weight: NaN and negative entries count as 0.
inline double positive(float p) { return p > 0 ? static_cast<double>(p) : 0.0; }

// The first token whose cumulated weight exceeds coin * total, else the last of positive weight, else -1.
template <typename Weight>
int64_t draw(int64_t vocab, double coin, const Weight& weight) {
  double total = 0;
  for (int64_t token = 0; token < vocab; ++token) total += weight(token);
  const double target = coin * total;
  double reached = 0;
  int64_t last = -1;
  for (int64_t token = 0; token < vocab; ++token) {
    const double w = weight(token);
    if (!(w > 0)) continue;
    reached += w;
    last = token;
    if (reached > target) break;
  }
  return last;
}

}  // namespace dsv4
