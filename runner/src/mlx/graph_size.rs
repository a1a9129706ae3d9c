//! How many operations a computation consists of: host time grows with it, whatever the kernels cost.
//!
//! Invariant: counting evaluates nothing; operations already evaluated are not counted.

use std::ffi::CStr;

use mlx_rs::error::{Exception, Result};
use mlx_rs::Array;

use super::ops::ArrayVector;

/// Operations between what is evaluated already and `outputs`.
///
/// # Errors
/// The graph can't be written to memory.
pub fn operations(outputs: &[&Array]) -> Result<usize> {
    let outputs = ArrayVector::new(outputs.iter().copied());
    let mut text: *mut libc::c_char = std::ptr::null_mut();
    let mut length = 0;
    // SAFETY: both pointers live until the file is closed below.
    let file = unsafe { libc::open_memstream(&mut text, &mut length) };
    if file.is_null() {
        return Err(Exception::custom("no memory for the graph's text"));
    }
    // SAFETY: the file was opened above; MLX writes to it through its C interface only, during the call.
    let status = unsafe {
        let namer = mlx_sys::mlx_node_namer_new();
        let status = mlx_sys::mlx_export_to_dot(file.cast(), namer, outputs.0);
        mlx_sys::mlx_node_namer_free(namer);
        libc::fclose(file);
        status
    };
    if text.is_null() {
        return Err(Exception::custom("no memory for the graph's text"));
    }
    // SAFETY: closing has made `text` a NUL-terminated string of ours, freed once, here.
    let count = unsafe {
        let dot = CStr::from_ptr(text).to_string_lossy();
        // Arrays are drawn as ellipses, operations as rectangles.
        let count = dot.matches("shape=rectangle").count();
        drop(dot);
        libc::free(text.cast());
        count
    };
    match status {
        0 => Ok(count),
        _ => Err(Exception::custom(
            super::ops::last_error().unwrap_or_else(|| "the graph can't be written".to_owned()),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_counted_once_and_evaluated_ones_not_at_all() {
        let a = Array::from_slice(&[1.0f32, 2.0], &[2]);
        let b = a.add(&a).unwrap();
        let c = b.multiply(&b).unwrap().subtract(&b).unwrap();
        assert_eq!(operations(&[&c, &b]).unwrap(), 3);
        mlx_rs::transforms::eval([&b]).unwrap();
        assert_eq!(operations(&[&c]).unwrap(), 2);
    }
}
