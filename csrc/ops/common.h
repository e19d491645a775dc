// What the CPU kernels share: checks that keep a direct torch.ops call from writing out of bounds, and index tensors of
// either width. Everything stands on LibTorch's stable ABI (TORCH_TARGET_VERSION 2.10).
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>

namespace dsv4 {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A contiguous int32 or int64 tensor, read as int64.
class Indices {
 public:
  Indices(const Tensor& tensor, const char* name) : data_(tensor.const_data_ptr()), count_(tensor.numel()) {
    const ScalarType type = tensor.scalar_type();
    STD_TORCH_CHECK(type == ScalarType::Int || type == ScalarType::Long, name, " must be int32 or int64");
    STD_TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous");
    wide_ = type == ScalarType::Long;
  }
  int64_t size() const { return count_; }
  int64_t operator[](int64_t i) const {
    return wide_ ? static_cast<const int64_t*>(data_)[i] : static_cast<const int32_t*>(data_)[i];
  }

 private:
  const void* data_;
  int64_t count_;
  bool wide_ = false;
};

// Threads pay off from about this many bytes of work each.
constexpr int64_t kBytesPerTask = 1 << 16;

inline int64_t grain(int64_t bytes_per_item) {
  return bytes_per_item <= 0 ? kBytesPerTask : (kBytesPerTask + bytes_per_item - 1) / bytes_per_item;
}

}  // namespace dsv4
