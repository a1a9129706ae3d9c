//! Text on both sides of the model: prompts in, streamed text out.
//!
//! Everything here is pure: no device type, no thread, no I/O but reading a checkpoint's files. The invariant that
//! the parts keep together: the text a request streams is a function of its ids alone, never of how they were
//! grouped, and every id is delivered once, with the text it contributes to.

mod clock;
mod detokenizer;
mod eos;
mod error;
mod messages;
mod pieces;
mod python_json;
mod regex_fix;
mod stop;
mod stream;
mod template;
mod template_source;
#[cfg(test)]
pub(crate) mod test_support;
mod tokenizer;
mod turns;

pub use detokenizer::Utf8Decoder;
pub use eos::EosSet;
pub use error::TextError;
pub use stop::{StopError, StopMatch, StopScanner, StopSet};
pub use stream::{Chunk, Push, TextStream};
pub use template::{ChatTemplate, RenderOptions, TemplateError, THINK_CLOSE};
pub use tokenizer::{Bos, Specials, Tokenizer};
pub use turns::TurnMarkers;
