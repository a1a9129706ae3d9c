// The C++ library's hash of a string of bytes, in chains that don't wait for each other.
//
// MLX hashes the whole image of a compiled CUDA kernel at every launch, some ten thousand bytes, which takes longer than the rest
// of the launch. An executable's definition takes the place of the library's for everybody in the process, so that all agree.
// Nobody may rely on the values: they are those of no other process, and of no other version of this file.
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

// Odd constants with half of their bits set.
constexpr uint64_t kA = 0x9e3779b97f4a7c15, kB = 0xc2b2ae3d27d4eb4f, kC = 0x165667b19e3779f9, kD = 0xd6e8feb86659fd93;

uint64_t word(const unsigned char* from) {
  uint64_t value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

uint64_t fold(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

} // namespace

namespace std {

__attribute__((visibility("default"))) size_t _Hash_bytes(const void* data, size_t len, size_t seed) {
  const auto* at = static_cast<const unsigned char*>(data);
  size_t left = len;
  uint64_t hash = seed ^ kD;
  if (left >= 64) {
    // Four chains that don't wait for each other.
    uint64_t a = hash, b = hash ^ kA, c = hash ^ kB, d = hash ^ kC;
    for (; left >= 64; left -= 64, at += 64) {
      a = fold(a ^ word(at), kA ^ word(at + 8));
      b = fold(b ^ word(at + 16), kB ^ word(at + 24));
      c = fold(c ^ word(at + 32), kC ^ word(at + 40));
      d = fold(d ^ word(at + 48), kD ^ word(at + 56));
    }
    hash = fold(a ^ kB, b ^ kC) ^ fold(c ^ kD, d ^ kA);
  }
  for (; left >= 8; left -= 8, at += 8) {
    hash = fold(hash ^ word(at), kA);
  }
  uint64_t last = 0;
  if (left > 0) {
    std::memcpy(&last, at, left);
  }
  return fold(fold(hash ^ last, kB), kC ^ len);
}

} // namespace std
