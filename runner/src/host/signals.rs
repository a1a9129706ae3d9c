//! SIGINT and SIGTERM.
//!
//! Invariant: the first one ends the process in good order, a second one at once with status 128 + its number.

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::latch::{Latch, Reason};

/// Starts the `signals` thread.
///
/// # Errors
/// The handlers can't be installed or the thread can't be started.
pub fn watch(latch: Latch) -> std::io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            let mut seen = false;
            for signal in signals.forever() {
                if seen {
                    // Ends without destructors: the first signal's orderly end is what hangs.
                    // SAFETY: `_exit` takes no pointer and does not return.
                    unsafe { libc::_exit(128 + signal) };
                }
                seen = true;
                latch.trip(Reason::Signal(signal));
            }
        })?;
    Ok(())
}
