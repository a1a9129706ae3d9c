//! The hash that takes the place of the C++ library's: it is there, and tells images apart.
#![cfg(target_os = "linux")]

use std::collections::HashSet;
use std::ffi::{c_char, c_int, c_void};

// Brings in the archive that defines the function below.
use mlx_sys as _;

extern "C" {
    #[link_name = "_ZSt11_Hash_bytesPKvmm"]
    fn hash_bytes(data: *const c_void, len: usize, seed: usize) -> usize;
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
    fn dladdr(address: *const c_void, info: *mut Info) -> c_int;
}

/// Where an address is from.
#[repr(C)]
struct Info {
    file: *const c_char,
    base: *const c_void,
    name: *const c_char,
    address: *const c_void,
}

fn hash(bytes: &[u8]) -> usize {
    // SAFETY: reads exactly the slice.
    unsafe { hash_bytes(bytes.as_ptr().cast(), bytes.len(), 0xc70f_6907) }
}

#[test]
fn shared_libraries_hash_with_the_executables_function() {
    let base = |address: *const c_void| {
        let mut info = Info {
            file: std::ptr::null(),
            base: std::ptr::null(),
            name: std::ptr::null(),
            address: std::ptr::null(),
        };
        // SAFETY: fills the structure that it is given.
        assert_ne!(unsafe { dladdr(address, &mut info) }, 0);
        info.base
    };
    // SAFETY: looks a name up in the order in which libraries do.
    let found = unsafe { dlsym(std::ptr::null_mut(), c"_ZSt11_Hash_bytesPKvmm".as_ptr()) };
    assert!(!found.is_null());
    assert_eq!(base(found), base(hash as *const c_void), "the executable's own");
}

#[test]
fn every_bit_and_every_length_counts() {
    let bytes: Vec<u8> = (0..300u32).map(|i| (i * 37 % 251) as u8).collect();
    let mut seen = HashSet::new();
    for len in 0..bytes.len() {
        assert!(seen.insert(hash(&bytes[..len])), "length {len}");
        assert_eq!(hash(&bytes[..len]), hash(&bytes.clone()[..len]));
    }
    for len in [1, 7, 8, 9, 63, 64, 65, 128, 200, 300] {
        let mut flipped = bytes[..len].to_vec();
        for bit in 0..8 * len {
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(seen.insert(hash(&flipped)), "bit {bit} of {len} bytes");
            flipped[bit / 8] ^= 1 << (bit % 8);
        }
    }
    // Zeros of different lengths, as names padded alike would be.
    let zeros = [0u8; 256];
    let hashes: HashSet<usize> = (0..=256).map(|len| hash(&zeros[..len])).collect();
    assert_eq!(hashes.len(), 257);
}

#[test]
fn buckets_fill_evenly() {
    let mut buckets = [0usize; 256];
    for i in 0..65_536u32 {
        buckets[hash(format!("lookahead_kernel_{i}").as_bytes()) % 256] += 1;
    }
    let (least, most) = (buckets.iter().min(), buckets.iter().max());
    assert!(least > Some(&180) && most < Some(&340), "{least:?} {most:?}");
}
