// One instruction set's kernel for a few rows times a transposed matrix; skinny.h includes this file once for each.
// Before that it defines KERNEL (a namespace) and TARGET (a function attribute), and in that namespace Vec, kLanes,
// kWider (how many dozens of sums the registers hold), zero, load, fma and sum4. B is read through load as well, which
// widens bfloat16 exactly: a matrix of such numbers gives what the same numbers in float32 give.
//
// An element's value depends on its two rows and on k alone: lane l adds up the products l, l + kLanes, ..., a short
// last step is padded with zeros, and sum4 adds the lanes in one fixed tree. Tiles decide only which elements are
// computed together, so a row comes out bit for bit the same whatever stands beside it.

namespace KERNEL {

// Elements of `rows` rows of A times `columns` rows of B: each vector that is loaded serves several of them.
template <int rows, int columns, class Number>
TARGET inline void tile(
    const Product<Number>& p, std::ptrdiff_t ahead, const float* a, const Number* const (&b)[columns],
    float (&out)[(rows * columns + 3) / 4 * 4]) {
  constexpr int count = (rows * columns + 3) / 4 * 4;
  Vec sums[count];
#pragma GCC unroll 16
  for (int i = 0; i < count; ++i) {
    sums[i] = zero();
  }
  auto step = [&](auto at_a, auto at_b) TARGET __attribute__((always_inline)) {
    // The side with fewer vectors stays in registers, so that a tile of 12 sums fits 16 of them.
    if constexpr (columns <= rows) {
      Vec kept[columns];
#pragma GCC unroll 16
      for (int j = 0; j < columns; ++j) {
        kept[j] = at_b(j);
      }
#pragma GCC unroll 16
      for (int i = 0; i < rows; ++i) {
        Vec x = at_a(i);
#pragma GCC unroll 16
        for (int j = 0; j < columns; ++j) {
          sums[i * columns + j] = fma(x, kept[j], sums[i * columns + j]);
        }
      }
    } else {
      Vec kept[rows];
#pragma GCC unroll 16
      for (int i = 0; i < rows; ++i) {
        kept[i] = at_a(i);
      }
#pragma GCC unroll 16
      for (int j = 0; j < columns; ++j) {
        Vec y = at_b(j);
#pragma GCC unroll 16
        for (int i = 0; i < rows; ++i) {
          sums[i * columns + j] = fma(kept[i], y, sums[i * columns + j]);
        }
      }
    }
  };
  std::ptrdiff_t at = 0;
  for (; at + kLanes <= p.k; at += kLanes) {
    if (ahead) {
#pragma GCC unroll 16
      for (int j = 0; j < columns; ++j) {
        __builtin_prefetch(b[j] + at + ahead, 0, 2);
      }
    }
    step(
        [&](int i) TARGET __attribute__((always_inline)) { return load(a + i * p.lda + at); },
        [&](int j) TARGET __attribute__((always_inline)) { return load(b[j] + at); });
  }
  if (at < p.k) {
    auto padded = [&](const auto* from) TARGET __attribute__((always_inline)) {
      std::remove_cv_t<std::remove_reference_t<decltype(*from)>> lanes[kLanes] = {};
      std::memcpy(lanes, from + at, (p.k - at) * sizeof lanes[0]);
      return load(lanes);
    };
    step(
        [&](int i) TARGET __attribute__((always_inline)) { return padded(a + i * p.lda); },
        [&](int j) TARGET __attribute__((always_inline)) { return padded(b[j]); });
  }
#pragma GCC unroll 16
  for (int i = 0; i < count; i += 4) {
    sum4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3], out + i);
  }
}

template <int rows, int columns, class Number>
TARGET void place(
    const Product<Number>& p, std::ptrdiff_t ahead, int row, int column, int end, const Number* const (&b)[columns]) {
  float sums[(rows * columns + 3) / 4 * 4];
  tile<rows, columns>(p, ahead, p.a + row * p.lda, b, sums);
  int width = end - column < columns ? end - column : columns;
  for (int i = 0; i < rows; ++i) {
    float* c = p.c + (row + i) * p.ldc + column;
    for (int j = 0; j < width; ++j) {
      float value = p.alpha * sums[i * columns + j];
      // What C holds counts for nothing when beta is zero, not even a NaN.
      c[j] = p.beta == 0 ? value : value + p.beta * c[j];
    }
  }
}

// Every row of A meets a few rows of B while these are in the nearest cache. Rows of A go in as few groups of
// `fewest` to `most` as there can be.
template <int columns, int fewest, int most, class Number>
TARGET void sweep(const Product<Number>& p, int begin, int end) {
  int groups = (p.m + most - 1) / most;
  for (int column = begin; column < end; column += columns) {
    const Number* b[columns];
    for (int j = 0; j < columns; ++j) {
      // A tile that sticks out repeats the last row and drops the result.
      b[j] = p.b + (column + j < end ? column + j : end - 1) * p.ldb;
    }
    // Fetches the next rows meanwhile, which the processor does by itself for the many streams of a single row.
    std::ptrdiff_t ahead = most > 1 && column + columns < end ? columns * p.ldb : 0;
    for (int group = 0; group < groups; ++group) {
      int row = group * p.m / groups;
      int size = (group + 1) * p.m / groups - row;
      if (size == fewest) {
        place<fewest, columns>(p, ahead, row, column, end, b);
      } else {
        place<most, columns>(p, ahead, row, column, end, b);
      }
      ahead = 0;
    }
  }
}

// Columns `begin..end` of C, which has 1 to 16 rows, in tiles that load few vectors for each product.
template <class Number>
TARGET void columns(const Product<Number>& p, int begin, int end) {
  switch (p.m) {
    case 1:
      return sweep<8, 1, 1>(p, begin, end);
    case 2: case 3: case 5: case 6: case 9:
      return sweep<4 * kWider, 2, 3>(p, begin, end);
    default:
      return sweep<3 * kWider, 3, 4>(p, begin, end);
  }
}

TARGET void widen_all(const bf16* from, std::size_t count, float* to) {
  std::size_t at = 0;
  for (; at + kLanes <= count; at += kLanes) {
    Vec wide = load(from + at);
    std::memcpy(to + at, &wide, sizeof wide);
  }
  for (; at < count; ++at) {
    to[at] = widen(from[at]);
  }
}

} // namespace KERNEL
