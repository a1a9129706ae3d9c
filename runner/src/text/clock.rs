//! The date for templates that ask for it.
//!
//! Invariant: [`local_time`] formats like Python's `datetime.now().strftime`, which is what templates are written for;
//! a format that yields nothing, or more than a template could want, gives an empty string, never a failure.

use std::ffi::CString;
use std::time::{SystemTime, UNIX_EPOCH};

/// Longest result in bytes.
const LIMIT: usize = 1024;

/// The local time now, in the given `strftime` format.
pub(super) fn local_time(format: &str) -> String {
    let seconds = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |elapsed| elapsed.as_secs());
    format_time(seconds, format)
}

fn format_time(seconds: u64, format: &str) -> String {
    let (Ok(seconds), Ok(format)) = (libc::time_t::try_from(seconds), CString::new(format)) else {
        return String::new();
    };
    let mut parts = std::mem::MaybeUninit::<libc::tm>::uninit();
    // SAFETY: both pointers are valid for the call; `localtime_r` fills the structure or returns null.
    let parts = unsafe {
        if libc::localtime_r(&raw const seconds, parts.as_mut_ptr()).is_null() {
            return String::new();
        }
        parts.assume_init()
    };
    let mut buffer = vec![0_u8; LIMIT];
    // SAFETY: the buffer has the length that is passed, the format ends with a zero byte, and `strftime` writes no more
    // than that length and returns how much it wrote.
    let len = unsafe {
        libc::strftime(
            buffer.as_mut_ptr().cast(),
            buffer.len(),
            format.as_ptr(),
            &raw const parts,
        )
    };
    buffer.truncate(len);
    String::from_utf8_lossy(&buffer).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_format_is_strftime() {
        // Noon UTC is the same day in all but the outermost time zones.
        assert_eq!(format_time(1_700_049_600, "%Y-%m %%"), "2023-11 %");
        assert_eq!(local_time("%Y").len(), 4);
    }

    #[test]
    fn formats_that_cannot_be_used_give_nothing() {
        assert_eq!(format_time(0, ""), "");
        assert_eq!(format_time(0, "a\0b"), "");
        assert_eq!(format_time(0, &"%A".repeat(2000)), "");
    }
}
