//! How a process ended, in words.
//!
//! Invariant: every exit status has a description that a person understands without a table of signal numbers.

use std::process::ExitStatus;

/// Describes an exit status: `exited with status 3 (internal fault)`, `was killed by SIGSEGV (signal 11, invalid memory access)`.
pub fn describe(status: ExitStatus) -> String {
    if let Some(code) = status.code() {
        return match exit_code_meaning(code) {
            Some(meaning) => format!("exited with status {code} ({meaning})"),
            None => format!("exited with status {code}"),
        };
    }
    match signal_of(status) {
        Some(signal) => match signal_meaning(signal) {
            Some((name, meaning)) => format!("was killed by {name} (signal {signal}, {meaning})"),
            None => format!("was killed by signal {signal}"),
        },
        None => "ended with an unknown status".to_owned(),
    }
}

/// The signal that ended the process, if one did.
#[cfg(unix)]
pub fn signal_of(status: ExitStatus) -> Option<i32> {
    use std::os::unix::process::ExitStatusExt;
    status.signal()
}

fn exit_code_meaning(code: i32) -> Option<&'static str> {
    match code {
        0 => Some("shutdown"),
        1 => Some("load failed"),
        2 => Some("bad command line"),
        3 => Some("internal fault"),
        101 => Some("panic"),
        _ => None,
    }
}

fn signal_meaning(signal: i32) -> Option<(&'static str, &'static str)> {
    Some(match signal {
        libc::SIGHUP => ("SIGHUP", "terminal closed"),
        libc::SIGINT => ("SIGINT", "interrupt"),
        libc::SIGQUIT => ("SIGQUIT", "quit"),
        libc::SIGILL => ("SIGILL", "illegal instruction"),
        libc::SIGTRAP => ("SIGTRAP", "trap"),
        libc::SIGABRT => ("SIGABRT", "abort, a failed assertion or an uncaught exception"),
        libc::SIGBUS => ("SIGBUS", "bus error, such as a model file cut short while mapped"),
        libc::SIGFPE => ("SIGFPE", "arithmetic fault"),
        libc::SIGKILL => ("SIGKILL", "killed from outside, often for want of memory"),
        libc::SIGSEGV => ("SIGSEGV", "invalid memory access"),
        libc::SIGPIPE => ("SIGPIPE", "broken pipe"),
        libc::SIGALRM => ("SIGALRM", "alarm"),
        libc::SIGTERM => ("SIGTERM", "termination requested"),
        libc::SIGXCPU => ("SIGXCPU", "processor time limit"),
        libc::SIGXFSZ => ("SIGXFSZ", "file size limit"),
        libc::SIGSYS => ("SIGSYS", "forbidden system call"),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;

    #[test]
    fn signals_have_a_name_and_a_meaning() {
        // SceneWorks #374: "exited unexpectedly" tells a user nothing.
        let killed = describe(ExitStatus::from_raw(libc::SIGKILL));
        assert_eq!(
            killed,
            "was killed by SIGKILL (signal 9, killed from outside, often for want of memory)"
        );
        assert!(describe(ExitStatus::from_raw(libc::SIGSEGV)).contains("SIGSEGV (signal 11"));
        assert_eq!(describe(ExitStatus::from_raw(63)), "was killed by signal 63");
    }

    #[test]
    fn exit_codes_of_the_protocol_are_explained() {
        assert_eq!(
            describe(ExitStatus::from_raw(3 << 8)),
            "exited with status 3 (internal fault)"
        );
        assert_eq!(describe(ExitStatus::from_raw(77 << 8)), "exited with status 77");
    }
}
