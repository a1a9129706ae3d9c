//! A child's stderr, passed on with a prefix and at a bounded rate.
//!
//! Invariant: the pipe is always drained, so a child never blocks on its log; what is passed on is bounded per second, and
//! what is left out is counted and said.

use std::io::Read;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::tail::Tail;

/// Lines passed on in a burst.
const BURST_LINES: f64 = 400.0;
/// Lines passed on per second after the burst.
const LINES_PER_SECOND: f64 = 50.0;
/// A longer line is passed on cut.
const LINE_BYTES: usize = 2048;

/// Reads `pipe` to its end. Each line goes to `emit` as `[name] line`, rate-limited; the last bytes stay in `tail`.
pub fn relay(mut pipe: impl Read, name: &str, tail: &Arc<Mutex<Tail>>, mut emit: impl FnMut(&str)) {
    let mut buffer = vec![0_u8; 64 * 1024];
    let mut lines = Lines::default();
    let mut rate = RateLimit::new(Instant::now());
    loop {
        let count = match pipe.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(_) => break,
        };
        tail.lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(&buffer[..count]);
        let now = Instant::now();
        lines.feed(&buffer[..count], |line| rate.pass(now, name, line, &mut emit));
    }
    lines.finish(|line| rate.pass(Instant::now(), name, line, &mut emit));
    rate.report(name, &mut emit);
}

/// Splits a byte stream into lines of at most `LINE_BYTES`; the rest of a longer line is skipped.
#[derive(Default)]
struct Lines {
    partial: Vec<u8>,
}

impl Lines {
    fn feed(&mut self, mut chunk: &[u8], mut each: impl FnMut(&[u8])) {
        while let Some(end) = chunk.iter().position(|&b| b == b'\n') {
            self.extend(&chunk[..end]);
            each(&self.partial);
            self.partial.clear();
            chunk = &chunk[end + 1..];
        }
        self.extend(chunk);
    }

    fn extend(&mut self, bytes: &[u8]) {
        let room = LINE_BYTES.saturating_sub(self.partial.len());
        self.partial.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }

    fn finish(&mut self, mut each: impl FnMut(&[u8])) {
        if !self.partial.is_empty() {
            each(&self.partial);
            self.partial.clear();
        }
    }
}

/// A token bucket of lines.
struct RateLimit {
    allowance: f64,
    last: Instant,
    suppressed: u64,
}

impl RateLimit {
    fn new(now: Instant) -> Self {
        Self {
            allowance: BURST_LINES,
            last: now,
            suppressed: 0,
        }
    }

    fn pass(&mut self, now: Instant, name: &str, line: &[u8], emit: &mut impl FnMut(&str)) {
        let gained = now
            .saturating_duration_since(self.last)
            .min(Duration::from_secs(60))
            .as_secs_f64()
            * LINES_PER_SECOND;
        self.allowance = (self.allowance + gained).min(BURST_LINES);
        self.last = now;
        if self.allowance < 1.0 {
            self.suppressed += 1;
            return;
        }
        self.report(name, emit);
        self.allowance -= 1.0;
        let text = String::from_utf8_lossy(line);
        let text = text.trim_end_matches('\r');
        if !text.trim().is_empty() {
            emit(&format!("[{name}] {text}"));
        }
    }

    fn report(&mut self, name: &str, emit: &mut impl FnMut(&str)) {
        if self.suppressed > 0 {
            emit(&format!("[{name}] ({} more lines left out)", self.suppressed));
            self.suppressed = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn relayed(input: &[u8]) -> (Vec<String>, String) {
        let tail = Arc::new(Mutex::new(Tail::default()));
        let mut lines = Vec::new();
        relay(input, "m", &tail, |line| lines.push(line.to_owned()));
        let text = tail.lock().unwrap().text();
        (lines, text)
    }

    #[test]
    fn lines_carry_the_name_and_the_last_one_needs_no_line_end() {
        let (lines, tail) = relayed(b"one\r\n\ntwo");
        assert_eq!(lines, ["[m] one", "[m] two"]);
        assert_eq!(tail, "one\r\n\ntwo".replace('\r', ""));
    }

    #[test]
    fn a_flood_is_counted_instead_of_passed_on() {
        let input = b"noise\n".repeat(100_000);
        let (lines, _) = relayed(&input);
        assert!(lines.len() < 1_000, "{} lines came through", lines.len());
        let left_out: u64 = lines
            .iter()
            .filter_map(|line| line.strip_prefix("[m] (")?.split(' ').next()?.parse::<u64>().ok())
            .sum();
        let passed = lines.iter().filter(|line| line.as_str() == "[m] noise").count() as u64;
        assert_eq!(left_out + passed, 100_000);
    }

    #[test]
    fn an_endless_line_is_cut() {
        let (lines, _) = relayed(&vec![b'x'; 1_000_000]);
        assert_eq!(lines.len(), 1);
        assert!(lines[0].len() <= LINE_BYTES + 4);
    }
}
