//! Process groups, signals and the tie between a child's life and ours.
//!
//! Invariant: every live child is in its own group and on one list, so that a signal meant for the scheduler (Ctrl-C in a
//! terminal) doesn't reach it, and the last exit path of the scheduler can end all of them at once.

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

static LIVE: Mutex<Vec<u32>> = Mutex::new(Vec::new());

pub(super) fn register(pid: u32) {
    LIVE.lock().unwrap_or_else(PoisonError::into_inner).push(pid);
}

pub(super) fn forget(pid: u32) {
    LIVE.lock()
        .unwrap_or_else(PoisonError::into_inner)
        .retain(|&live| live != pid);
}

/// Kills every live child and its group at once. For the moment before the process ends.
pub fn kill_all() {
    for &pid in LIVE.lock().unwrap_or_else(PoisonError::into_inner).iter() {
        signal(pid, libc::SIGKILL);
    }
}

/// Puts the child into a process group of its own.
pub(super) fn own_group(command: &mut Command) {
    command.process_group(0);
}

/// Sends a signal to the group that `pid` leads.
pub(super) fn signal(pid: u32, signal: i32) {
    let Ok(pid) = i32::try_from(pid) else { return };
    // SAFETY: kill takes plain integers; the caller's child hasn't been reaped, so the id is still its own.
    unsafe {
        libc::kill(-pid, signal);
    }
}

/// Asks the system to kill the child when this process ends in whatever way. Where the system can't (anything but Linux)
/// the child sees the end of its stdin.
#[cfg(target_os = "linux")]
pub fn tie_to_parent(command: &mut Command) {
    let parent = std::process::id();
    // SAFETY: the closure runs between fork and exec and only makes calls that are safe there: prctl, getppid and _exit.
    unsafe {
        command.pre_exec(move || {
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                return Err(std::io::Error::last_os_error());
            }
            // The parent may have ended before the request took effect; nobody would tell the child then.
            if libc::getppid() as u32 != parent {
                libc::_exit(1);
            }
            Ok(())
        });
    }
}

/// Asks the system to kill the child when this process ends in whatever way. Where the system can't (anything but Linux)
/// the child sees the end of its stdin.
#[cfg(not(target_os = "linux"))]
pub fn tie_to_parent(_command: &mut Command) {}

/// Waits until the process has ended, leaving its status to be taken later, so that its id isn't given away meanwhile.
pub(super) fn wait_without_reaping(pid: u32) {
    loop {
        // SAFETY: siginfo_t is plain data for which all zeroes is a valid value.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: `info` is a valid place to write to, and the id is that of a child that nobody else waits for.
        let status = unsafe {
            libc::waitid(
                libc::P_PID,
                pid as libc::id_t,
                &mut info,
                libc::WEXITED | libc::WNOWAIT,
            )
        };
        if status == 0 || std::io::Error::last_os_error().kind() != std::io::ErrorKind::Interrupted {
            return;
        }
    }
}
