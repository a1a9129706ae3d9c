// The half-float accessors that mlx-c offers on Arm only, with both types as their 16 bits.
#include <cstdint>
#include <cstring>
#include <exception>

#include "mlx/c/error.h"
#include "mlx/c/private/mlx.h"

namespace {
template <typename Half>
int item(uint16_t* res, mlx_array arr) {
  static_assert(sizeof(Half) == sizeof(uint16_t));
  try {
    Half value = mlx_array_get_(arr).item<Half>();
    std::memcpy(res, &value, sizeof(value));
    return 0;
  } catch (std::exception& e) {
    mlx_error(e.what());
    return 1;
  }
}

const uint16_t* data(mlx_array arr) {
  try {
    return mlx_array_get_(arr).data<uint16_t>();
  } catch (std::exception& e) {
    mlx_error(e.what());
    return nullptr;
  }
}
} // namespace

extern "C" int mlx_array_item_float16(uint16_t* res, const mlx_array arr) {
  return item<mlx::core::float16_t>(res, arr);
}

extern "C" int mlx_array_item_bfloat16(uint16_t* res, const mlx_array arr) {
  return item<mlx::core::bfloat16_t>(res, arr);
}

extern "C" const uint16_t* mlx_array_data_float16(const mlx_array arr) {
  return data(arr);
}

extern "C" const uint16_t* mlx_array_data_bfloat16(const mlx_array arr) {
  return data(arr);
}
