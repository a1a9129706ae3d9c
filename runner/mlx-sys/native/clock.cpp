// mlx-rs seeds its generator from a Mach clock; any steady clock does.
#include <chrono>
#include <cstdint>

extern "C" uint64_t mach_approximate_time() {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}
