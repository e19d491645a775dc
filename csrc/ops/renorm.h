// Renormalisation of probability rows after a choice of tokens.
#pragma once

#include <algorithm>
#include <vector>

#include "ops/sampling.h"

namespace dsv4 {

// More probable first; of equal ones the lower token.
struct Likelier {
  const float* p;
  bool operator()(int32_t a, int32_t b) const { return p[a] > p[b] || (p[a] == p[b] && a < b); }
};

// A new tensor of probs' shape: per row, `choose(row, p, tokens)` shortens the list of the positive tokens (ascending),
// and what is left is scaled to sum 1; the rest is 0.
template <typename Choose>
Tensor renorm(const Tensor& probs, const Choose& choose) {
  const float* in = read<float>(probs, "probs", {-1, -1});
  const int64_t rows = probs.size(0), vocab = probs.size(1);
  STD_TORCH_CHECK(vocab <= std::numeric_limits<int32_t>::max(), "probs has too many columns");
  Tensor result = torch::stable::empty_like(probs);
  float* out = static_cast<float*>(result.mutable_data_ptr());
  torch::stable::parallel_for(0, rows, grain(vocab * sizeof(float)), [&](int64_t begin, int64_t end) {
    std::vector<int32_t> tokens;
    for (int64_t row = begin; row < end; ++row) {
      const float* p = in + row * vocab;
      tokens.clear();
      for (int64_t token = 0; token < vocab; ++token) {
        if (p[token] > 0) tokens.push_back(static_cast<int32_t>(token));
      }
      choose(row, p, tokens);
      double mass = 0;
      for (int32_t token : tokens) mass += p[token];
      std::fill(out + row * vocab, out + (row + 1) * vocab, 0.0f);
      for (int32_t token : tokens) out[row * vocab + token] = static_cast<float>(p[token] / mass);
    }
  });
  return result;
}

}  // namespace dsv4
