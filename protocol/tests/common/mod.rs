//! Full and minimal samples of every message, shared by the tests of the written format.

mod events;
mod requests;

pub(crate) use events::{events, scheduler_events};
pub(crate) use requests::{requests, scheduler_requests};

fn id(id: &str) -> String {
    id.to_owned()
}
