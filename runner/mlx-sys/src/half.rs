//! Half floats as their 16 bits, with the type names and shapes that bindgen gives them on Apple's platforms.

use std::ffi::c_int;

use crate::mlx_array;

/// The bits of an IEEE half-precision number.
#[expect(non_camel_case_types, reason = "the C name")]
#[derive(Clone, Copy, Debug, Default)]
#[repr(transparent)]
pub struct float16_t(pub u16);

/// The bits of a bfloat16 number.
#[expect(non_camel_case_types, reason = "the C name")]
pub type bfloat16_t = u16;

extern "C" {
    /// Evaluates an array of one float16 element and stores it in `res`; 0 on success.
    pub fn mlx_array_item_float16(res: *mut float16_t, arr: mlx_array) -> c_int;
    /// Evaluates an array of one bfloat16 element and stores it in `res`; 0 on success.
    pub fn mlx_array_item_bfloat16(res: *mut bfloat16_t, arr: mlx_array) -> c_int;
    /// The elements of an evaluated float16 array.
    pub fn mlx_array_data_float16(arr: mlx_array) -> *const float16_t;
    /// The elements of an evaluated bfloat16 array.
    pub fn mlx_array_data_bfloat16(arr: mlx_array) -> *const bfloat16_t;
}
