// Attention of some rows over many keys in bfloat16, exact, in blocks of keys with a running softmax (FlashAttention:
// Dao et al., 2022), in pieces of the keys for all threads (flash decoding: Dao et al., 2023).
//
// A block of keys and values is packed once into pairs of numbers and then read from the first-level cache by all rows;
// one AVX512-BF16 instruction multiplies 16 pairs. The pieces depend on the number of keys alone, so that a row's result
// depends neither on the rows beside it nor on the number of threads.

#include <ATen/Parallel.h>
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

typedef float Lanes __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Bits __attribute__((vector_size(64), aligned(2), may_alias));
typedef uint32_t Pair __attribute__((aligned(2), may_alias));  // two bfloat16 numbers, the first one in the low half

constexpr int32_t WIDTH = 16;          // numbers or pairs in a register
constexpr int64_t BLOCK = 64;          // keys that are packed together
constexpr int64_t PIECE = 512;         // keys of a task
constexpr int64_t TILE = 6;            // rows whose sums stay in registers
constexpr int64_t LINE = 32;           // numbers in a line of the caches
constexpr int64_t ROWS_AT_ONCE = 192;  // rows whose parts are held in memory
constexpr Bits LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
// Score of a key that a row does not see. Its weight is 1e-38 or less of the others', and vanishes in float.
constexpr float LOWEST = -3e38f;

inline Lanes load(const float* from) { return *reinterpret_cast<const Lanes*>(from); }
inline void store(float* to, Lanes value) { *reinterpret_cast<Lanes*>(to) = value; }
inline Lanes broadcast(float value) { return value - Lanes{}; }
inline Lanes larger(Lanes a, Lanes b) { return a > b ? a : b; }
inline Lanes sum(Lanes a, Lanes b) { return a + b; }

// Reduce all lanes to a single number by a binary operation.
template <class Join>
inline float across(Lanes value, Join join) {
    for (const int32_t apart : {8, 4, 2, 1}) value = join(value, __builtin_shuffle(value, LANE ^ apart));
    return value[0];
}

// 2 to the power of x, to 2e-7 of the result; below -126 as at -126.
inline Lanes exp2(Lanes x) {
    const Lanes magic = broadcast(12582912.0f);  // 1.5 * 2^23: the sum's low bits are the nearest integer
    x = larger(x, broadcast(-126.0f));
    const Lanes whole = x + magic, part = x - (whole - magic);
    Lanes power = broadcast(1.5353362e-4f);
    for (const float factor : {1.3398874e-3f, 9.6184373e-3f, 5.5503324e-2f, 2.4022648e-1f, 6.9314718e-1f, 1.0f})
        power = power * part + factor;
    return (Lanes)((Bits)power + ((Bits)whole << 23));
}

// Exchange rows and columns of 16 x 16 words, first of quarters, then within them.
template <int32_t APART>
inline void transpose(Bits (&rows)[WIDTH]) {
    const Bits upper = (LANE & APART) != 0;
    for (int32_t row = 0; row < WIDTH; ++row)
        if (!(row & APART)) {
            const Bits a = rows[row], b = rows[row + APART];
            rows[row] = __builtin_shuffle(a, b, upper ? WIDTH + LANE - APART : LANE);
            rows[row + APART] = __builtin_shuffle(a, b, upper ? WIDTH + LANE : LANE + APART);
        }
    if constexpr (APART > 1) transpose<APART / 2>(rows);
}

// Call `call` with `number`, which is 1 to MOST, as a compile-time constant.
template <int64_t MOST, class Call>
inline void with_constant(int64_t number, Call&& call) {
    if (number == MOST)
        call(std::integral_constant<int64_t, MOST>{});
    else if constexpr (MOST > 1)
        with_constant<MOST - 1>(number, call);
}

// sums[row][group] += the row's pairs times a register of columns' pairs, over all steps
template <int64_t ROWS, int64_t GROUPS>
inline void multiply(const Pair* rows, int64_t row_stride, const Pair* columns, int64_t stride, int64_t steps,
                     Lanes (&sums)[ROWS][GROUPS]) {
    for (int64_t step = 0; step < steps; ++step)
        for (int64_t row = 0; row < ROWS; ++row)
            for (int64_t group = 0; group < GROUPS; ++group)
                sums[row][group] = (Lanes)_mm512_dpbf16_ps(
                    (__m512)sums[row][group], (__m512bh)_mm512_set1_epi32(int(rows[row * row_stride + step])),
                    (__m512bh)_mm512_loadu_si512(columns + step * stride + group * WIDTH));
}

// Memory that a thread keeps between calls, since fresh pages cost more than what is written to them.
template <class Word>
Word* room(int64_t size) {
    thread_local std::vector<Word> held;
    if (int64_t(held.size()) < size) held.resize(size);
    return held.data();
}

struct Attention {
    const uint16_t *query, *keys, *values;
    float *out, *lse;
    int64_t num_heads, num_rows, length, width, own, key_stride, value_stride;
    float scaling;

    void run() const {
        const int64_t pieces = (length + PIECE - 1) / PIECE;
        float* parts = room<float>(num_heads * pieces * std::min(num_rows, ROWS_AT_ONCE) * (width + 2));
        for (int64_t first = 0; first < num_rows; first += ROWS_AT_ONCE) {
            const int64_t rows = std::min(ROWS_AT_ONCE, num_rows - first), size = rows * (width + 2);
            at::parallel_for(0, num_heads * pieces, 1, [&](int64_t begin, int64_t end) {
                for (int64_t task = begin; task < end; ++task)
                    attend_piece(task / pieces, first, rows, task % pieces * PIECE, parts + task * size);
            });
            at::parallel_for(0, num_heads * rows, 64, [&](int64_t begin, int64_t end) {
                for (int64_t row = begin; row < end; ++row)
                    merge(row / rows, first, row % rows, rows, pieces, parts + row / rows * pieces * size);
            });
        }
    }

    // Number of keys that a row sees. Rows are ordered by query head, then by token; the last `own` keys are those of
    // the rows' own tokens.
    int64_t seen(int64_t row) const { return own ? length - own + row % own + 1 : length; }

    // Attend with `rows` rows of a head, from row `first` on, to the PIECE keys from `start` on. Writes to `part`:
    // [rows, width] weighted sums of values, [rows] greatest scores (base 2), [rows] sums of weights.
    void attend_piece(int64_t head, int64_t first, int64_t rows, int64_t start, float* part) const {
        float *greatest = part + rows * width, *total = greatest + rows;
        std::fill(part, greatest, 0.0f);
        std::fill(greatest, total, LOWEST);
        std::fill(total, total + rows, 0.0f);
        Pair *packed_keys = room<Pair>(BLOCK * width), *packed_values = packed_keys + BLOCK * width / 2;
        const uint16_t* asked = query + (head * num_rows + first) * width;
        const int64_t end = std::min(length, start + PIECE);
        for (int64_t from = start; from < end; from += BLOCK) {
            const int64_t count = std::min(BLOCK, end - from);
            const uint16_t *key = keys + head * key_stride + from * width;
            const uint16_t *value = values + head * value_stride + from * width;
            pack_keys(key, count, packed_keys);
            pack_values(value, count, packed_values);
            // The next block comes from memory while this one is multiplied. Beyond the last key this fetches nothing
            // that is used, and faults nowhere.
            for (int64_t at = BLOCK * width; at < 2 * BLOCK * width; at += LINE)
                for (const uint16_t* numbers : {key, value})
                    _mm_prefetch(reinterpret_cast<const char*>(numbers + at), _MM_HINT_T1);
            for (int64_t row = 0; row < rows; row += TILE)
                with_constant<TILE>(std::min(TILE, rows - row), [&](auto number) {
                    attend_tile<decltype(number)::value>(
                        first + row, from, count, reinterpret_cast<const Pair*>(asked + row * width), packed_keys,
                        packed_values, part + row * width, greatest + row, total + row);
                });
        }
    }

    // Pack keys into [width / 2, BLOCK] pairs: each column is a key; columns after the last key are zeros.
    void pack_keys(const uint16_t* from, int64_t count, Pair* to) const {
        for (int64_t key = 0; key < BLOCK; key += WIDTH)
            for (int64_t step = 0; step < width / 2; step += WIDTH) {
                const int64_t steps = std::min<int64_t>(WIDTH, width / 2 - step);
                const uint16_t* numbers = from + key * width + step * 2;
                Bits rows[WIDTH];
                if (steps == WIDTH && count - key >= WIDTH)  // a fixed number of rows stays in registers
                    for (int64_t row = 0; row < WIDTH; ++row)
                        rows[row] = *reinterpret_cast<const Bits*>(numbers + row * width);
                else
                    for (int64_t row = 0; row < WIDTH; ++row) {
                        rows[row] = Bits{};
                        if (row < count - key) std::memcpy(&rows[row], numbers + row * width, steps * sizeof(Pair));
                    }
                transpose<WIDTH / 2>(rows);
                for (int64_t row = 0; row < WIDTH; ++row)
                    if (row < steps) *reinterpret_cast<Bits*>(to + (step + row) * BLOCK + key) = rows[row];
            }
    }

    // Pack values into [BLOCK / 2, width] pairs: each row holds two keys' values; those after the last key are zeros.
    void pack_values(const uint16_t* from, int64_t count, Pair* to) const {
        for (int64_t key = 0; key < BLOCK; key += 2, from += 2 * width, to += width)
            if (key + 1 < count)
                for (int64_t at = 0; at < width; ++at) to[at] = from[at] | uint32_t(from[width + at]) << 16;
            else
                for (int64_t at = 0; at < width; ++at) to[at] = key < count ? from[at] : 0;
    }

    template <int64_t ROWS>
    void attend_tile(int64_t first, int64_t from, int64_t count, const Pair* asked, const Pair* packed_keys,
                     const Pair* packed_values, float* sums, float* greatest, float* total) const {
        constexpr int64_t GROUPS = BLOCK / WIDTH;
        Lanes scores[ROWS][GROUPS] = {};
        multiply<ROWS, GROUPS>(asked, width / 2, packed_keys, BLOCK, width / 2, scores);
        alignas(64) Pair weights[ROWS * BLOCK / 2];
        float rescale[ROWS];
        for (int64_t row = 0; row < ROWS; ++row) {
            Lanes(&score)[GROUPS] = scores[row];
            const int64_t visible = std::min(count, seen(first + row) - from);
            Lanes top = broadcast(greatest[row]), added = {};
            for (int64_t group = 0; group < GROUPS; ++group) {
                score[group] *= scaling * float(M_LOG2E);
                if (visible < BLOCK)
                    score[group] = LANE + int32_t(group * WIDTH) < int32_t(visible) ? score[group] : broadcast(LOWEST);
                top = larger(top, score[group]);
            }
            const float most = across(top, larger);
            for (int64_t group = 0; group < GROUPS; ++group) {
                score[group] = exp2(score[group] - most);
                added += score[group];
            }
            for (int64_t group = 0; group < GROUPS; group += 2)
                _mm512_storeu_si512(
                    weights + row * BLOCK / 2 + group * WIDTH / 2,
                    (__m512i)_mm512_cvtne2ps_pbh((__m512)score[group + 1], (__m512)score[group]));
            rescale[row] = exp2(broadcast(greatest[row] - most))[0];
            total[row] = total[row] * rescale[row] + across(added, sum);
            greatest[row] = most;
        }
        for (int64_t column = 0; column < width; column += GROUPS * WIDTH)
            with_constant<GROUPS>(std::min(GROUPS, (width - column) / WIDTH), [&](auto number) {
                constexpr int64_t PART = decltype(number)::value;
                Lanes held[ROWS][PART];
                for (int64_t row = 0; row < ROWS; ++row)
                    for (int64_t group = 0; group < PART; ++group)
                        held[row][group] = load(sums + row * width + column + group * WIDTH) * rescale[row];
                multiply<ROWS, PART>(weights, BLOCK / 2, packed_values + column, width, BLOCK / 2, held);
                for (int64_t row = 0; row < ROWS; ++row)
                    for (int64_t group = 0; group < PART; ++group)
                        store(sums + row * width + column + group * WIDTH, held[row][group]);
            });
    }

    void merge(int64_t head, int64_t first, int64_t row, int64_t rows, int64_t pieces, const float* parts) const {
        const int64_t size = rows * (width + 2);
        float most = LOWEST, total = 0.0f, *to = out + (head * num_rows + first + row) * width;
        for (int64_t piece = 0; piece < pieces; ++piece)
            most = std::max(most, parts[piece * size + rows * width + row]);
        std::fill(to, to + width, 0.0f);
        for (int64_t piece = 0; piece < pieces; ++piece) {
            const float* part = parts + piece * size;
            const float factor = std::exp2(part[rows * width + row] - most);
            total += factor * part[rows * width + rows + row];
            for (int64_t at = 0; at < width; ++at) to[at] += factor * part[row * width + at];
        }
        for (int64_t at = 0; at < width; ++at) to[at] /= total;
        lse[head * num_rows + first + row] = (most + std::log2(total)) * float(M_LN2);
    }
};

}  // namespace

// Compute softmax(query keys^T * scaling) values, with query, keys and values in bfloat16.
//
// query:        [num_heads, num_rows, width]; width is a multiple of 16
// keys, values: [num_heads, length, width]; key_stride and value_stride are the numbers from head to head
// own:          0: every row sees every key; else the number of tokens whose rows these are: their own keys are the
//               last `own` keys, and each row sees the keys up to its token's own
// out:          [num_heads, num_rows, width]
// lse:          [num_heads, num_rows], natural logarithm of the sum of the exponentiated scores
extern "C" void ragcache_attend(const void* query, const void* keys, const void* values, float* out, float* lse,
                                int64_t num_heads, int64_t num_rows, int64_t length, int64_t width, int64_t own,
                                int64_t key_stride, int64_t value_stride, float scaling) {
    const auto numbers = [](const void* from) { return static_cast<const uint16_t*>(from); };
    Attention{numbers(query), numbers(keys), numbers(values), out, lse, num_heads, num_rows, length, width, own,
              key_stride, value_stride, scaling}.run();
}
