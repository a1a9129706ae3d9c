//! The prefix cache of a real runner: what is found again, what it costs, and what survives.

mod disk;
mod faults;
mod long;
mod memory;
mod support;
mod timelines;
