// Stored keys, rotated on the way, and values, written to pages of a cache in one pass over a layer.
//
// Numbers are rotated in float32 and rounded once, with the roundings of PyTorch's own two operations: a product, then a
// multiplication fused with an addition. Pages whose numbers lie channel by channel are filled through a tile that stays
// in the first-level cache.

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t TILE = 32;    // tokens that are rotated together
constexpr int64_t WIDEST = 512;  // channels of a head

struct BFloat16 {
  uint16_t bits;
};

inline float to_float(float value) { return value; }
inline float to_float(_Float16 value) { return (float)value; }
inline float to_float(BFloat16 value) {
  const uint32_t bits = (uint32_t)value.bits << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

inline void round_to(float value, float& to) { to = value; }
inline void round_to(float value, _Float16& to) { to = (_Float16)value; }
inline void round_to(float value, BFloat16& to) {  // to the nearest, ties to even; stored numbers are finite
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  to.bits = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <class From, class To>
inline void copy(const From* __restrict from, To* __restrict to, int64_t count) {
  for (int64_t at = 0; at < count; ++at) round_to(to_float(from[at]), to[at]);
}

template <class Same>
inline void copy(const Same* from, Same* to, int64_t count) {
  std::memcpy(to, from, count * sizeof(Same));
}

// Rotate the pairs (d, d + half) of a row; channels from 2 * half on are copied.
template <class From, class To>
inline void rotate(const From* __restrict from, const float* __restrict cos, const float* __restrict sin, int64_t half,
                   int64_t width, To* __restrict to) {
  for (int64_t d = 0; d < half; ++d) {
    const float first = to_float(from[d]), second = to_float(from[d + half]);
    round_to(std::fma(-second, sin[d], first * cos[d]), to[d]);
    round_to(std::fma(first, sin[d], second * cos[d]), to[d + half]);
  }
  copy(from + 2 * half, to + 2 * half, width - 2 * half);
}

// Keys or values in pages: the address of the first number; the distances, in numbers, from head to head, page to page,
// token to token and channel to channel; and the number of channels.
struct Pages {
  int64_t data, head, page, token, channel, width;

  template <class To>
  To* at(int64_t own, int64_t slot, int64_t page_tokens) const {
    return (To*)data + own * head + slot / page_tokens * page + slot % page_tokens * token;
  }
};

// Tokens of a block to place: addresses of the first token's key and value in the block's first head; the distances,
// in numbers, from head to head of keys and of values; the index of the first token among all tokens to place; the
// number of tokens.
struct Part {
  int64_t keys, values, key_head, value_head, first, count;
};

// Write `count` tokens of a head to their slots. row(token, to) writes a token's channels consecutively to `to`.
template <class To, class Fill>
inline void fill(const Pages& pages, int64_t head, const int64_t* slots, int64_t count, int64_t page_tokens, Fill row) {
  To tile[TILE * WIDEST];
  for (int64_t begin = 0, run; begin < count; begin += run) {
    const int64_t room = std::min({TILE, count - begin, page_tokens - slots[begin] % page_tokens});
    for (run = 1; run < room && slots[begin + run] == slots[begin] + run;) ++run;
    To* to = pages.at<To>(head, slots[begin], page_tokens);
    if (pages.channel == 1) {
      for (int64_t token = 0; token < run; ++token) row(begin + token, to + token * pages.token);
      continue;
    }
    for (int64_t token = 0; token < run; ++token) row(begin + token, tile + token * pages.width);
    for (int64_t channel = 0; channel < pages.width; ++channel)
      for (int64_t token = 0; token < run; ++token)
        to[channel * pages.channel + token * pages.token] = tile[token * pages.width + channel];
  }
}

template <class From, class To>
void place(const Part* parts, int64_t num_parts, const int64_t* slots, const float* cos, const float* sin, int64_t half,
           const Pages& keys, const Pages& values, int64_t own, int64_t heads, int64_t page_tokens) {
  at::parallel_for(0, num_parts * heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const Part& part = parts[task / heads];
      const int64_t head = task % heads, *where = slots + part.first;
      const From* key = (const From*)part.keys + (own + head) * part.key_head;
      const From* value = (const From*)part.values + (own + head) * part.value_head;
      fill<To>(keys, head, where, part.count, page_tokens, [&](int64_t token, To* to) {
        const int64_t angle = (part.first + token) * half;
        rotate(key + token * keys.width, cos + angle, sin + angle, half, keys.width, to);
      });
      fill<To>(values, head, where, part.count, page_tokens,
               [&](int64_t token, To* to) { copy(value + token * values.width, to, values.width); });
    }
  });
}

template <class From, class... Rest>
bool place_to(int64_t to, Rest... rest) {
  switch (to) {
    case 0: place<From, float>(rest...); return true;
    case 1: place<From, BFloat16>(rest...); return true;
    case 2: place<From, _Float16>(rest...); return true;
  }
  return false;
}

}  // namespace

// Write a layer's rotated keys, and its values, to pages. Returns false, and writes nothing, for heads wider than
// WIDEST or an unknown `to`.
//
// slots:    [tokens], the slot that each token goes to: its page is slot / page_tokens
// cos, sin: [tokens, half]
// own:      the blocks' head that is written to the pages' first head
// heads:    number of heads of the pages
// from, to: dtypes of blocks and pages: 0 float32, 1 bfloat16, 2 float16
extern "C" bool ragcache_place(const Part* parts, int64_t num_parts, const int64_t* slots, const float* cos,
                            const float* sin, int64_t half, const Pages* keys, const Pages* values, int64_t own,
                            int64_t heads, int64_t page_tokens, int64_t from, int64_t to) {
  if (std::max(keys->width, values->width) > WIDEST) return false;
  const auto run = [&](auto number) {
    return place_to<decltype(number)>(to, parts, num_parts, slots, cos, sin, half, *keys, *values, own, heads,
                                      page_tokens);
  };
  return from == 0 ? run(0.0f) : from == 1 ? run(BFloat16{}) : run((_Float16)0);
}
