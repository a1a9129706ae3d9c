//! How much memory the machine has, and sizes as people write them.
//!
//! Invariant: a default budget is always found; where the machine can't be asked it is a small one.

use std::fs;

/// The part of the machine's memory that models may take by default, in per cent.
const DEFAULT_SHARE: u64 = 80;
/// The budget where the machine's memory is unknown.
const FALLBACK: u64 = 8 << 30;

/// The default memory budget for all models together, in bytes.
pub fn default_budget() -> u64 {
    machine_memory().map_or(FALLBACK, |bytes| bytes / 100 * DEFAULT_SHARE)
}

/// The machine's memory in bytes, or less where a control group grants less.
pub fn machine_memory() -> Option<u64> {
    let physical = physical_memory();
    let granted = [
        "/sys/fs/cgroup/memory.max",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    ]
    .iter()
    .filter_map(|path| fs::read_to_string(path).ok())
    .find_map(|text| text.trim().parse::<u64>().ok());
    match (physical, granted) {
        (Some(physical), Some(granted)) => Some(physical.min(granted)),
        (physical, granted) => physical.or(granted),
    }
}

#[cfg(target_os = "linux")]
fn physical_memory() -> Option<u64> {
    mem_total(&fs::read_to_string("/proc/meminfo").ok()?)
}

#[cfg(target_os = "linux")]
fn mem_total(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim()
        .strip_suffix("kB")?
        .trim()
        .parse::<u64>()
        .ok()
        .map(|kib| kib * 1024)
}

#[cfg(target_os = "macos")]
fn physical_memory() -> Option<u64> {
    let mut bytes = 0_u64;
    let mut size = std::mem::size_of::<u64>();
    // SAFETY: the name is a C string, and `bytes` and `size` describe a writable u64, which is what hw.memsize holds.
    let status = unsafe {
        libc::sysctlbyname(
            c"hw.memsize".as_ptr(),
            std::ptr::from_mut(&mut bytes).cast(),
            &mut size,
            std::ptr::null_mut(),
            0,
        )
    };
    (status == 0 && bytes > 0).then_some(bytes)
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
fn physical_memory() -> Option<u64> {
    None
}

/// Reads a size such as `20GiB`, `8G`, `512MB` or plain bytes. G, M, K and T alone are binary, as are GiB and friends.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor: f64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "k" | "kib" => 1024.0,
        "m" | "mib" => 1024.0 * 1024.0,
        "g" | "gib" => 1024.0 * 1024.0 * 1024.0,
        "t" | "tib" => 1024.0 * 1024.0 * 1024.0 * 1024.0,
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "tb" => 1e12,
        _ => {
            return Err(format!(
                "size {text:?} has an unknown unit; write for example 20GiB"
            ))
        }
    };
    let number: f64 = number
        .parse()
        .map_err(|_| format!("size {text:?} isn't a number with a unit such as 20GiB"))?;
    Ok((number * factor) as u64)
}

/// A size for people, such as `1.4 GiB`.
pub fn show_size(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        assert_eq!(parse_size("1024"), Ok(1024));
        assert_eq!(parse_size("20GiB"), Ok(20 << 30));
        assert_eq!(parse_size(" 1.5 G "), Ok(3 << 29));
        assert_eq!(parse_size("512MB"), Ok(512_000_000));
        assert!(parse_size("many").unwrap_err().contains("unknown unit"));
        assert!(parse_size("1.2.3G").is_err());
    }

    #[test]
    fn sizes_are_shown_with_one_digit() {
        assert_eq!(show_size(17), "17 B");
        assert_eq!(show_size(3 << 29), "1.5 GiB");
    }

    #[test]
    fn the_machine_has_memory() {
        assert!(default_budget() > 64 << 20);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn meminfo_is_in_kib() {
        assert_eq!(
            mem_total("MemTotal:       24576 kB\nMemFree: 1 kB\n"),
            Some(24576 * 1024)
        );
        assert_eq!(mem_total("nonsense"), None);
    }
}
