//! The wire protocol between a host and Lookahead.
#![deny(missing_docs)]

pub mod codec;
mod error;
pub mod event;
mod names;
pub mod request;
pub mod transcript;

pub use codec::{Line, LineReader, LineWriter, WriteError};
pub use error::{ErrorCode, RequestError};
pub use event::{Event, RawEvent, Tagged};
pub use request::{Request, SchedulerRequest};
