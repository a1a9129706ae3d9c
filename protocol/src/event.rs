//! Events, program to host. Writing is exact: each event has the members its type documents and no others. Reading is
//! tolerant: members that this version doesn't know are ignored, and so is no event of an unknown type an error.

mod generation;
mod lifecycle;
mod models;
mod raw;
mod replies;
mod status;

pub use generation::{
    Done, DoneReason, DraftStats, Failure, PositionStats, Prefill, Prompt, Token, TokenLogprob, TopLogprob,
};
pub use lifecycle::{
    Backend, DraftInfo, Hello, LoadProgress, LoadStage, MemoryInfo, ModelInfo, ProtocolVersion, Ready,
};
pub use models::{Loaded, ModelEntry, ModelState, Models, Unloaded};
pub use raw::{EventError, RawEvent};
pub use replies::{CacheReply, Cancelled, Detokenized, Pong, Rendered, Tokenized};
pub use status::{
    AcceptanceEstimate, CacheStatus, DiskTier, DraftRates, DraftStatus, MemoryStatus, Phase, RequestCounts,
    RoundCost, RunningRequest, SamplingKind, State, Status, Tier,
};

use serde::Serialize;

/// What a program tells its host. Serialises to one line's object.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Event {
    /// The first line, before loading.
    Hello(Hello),
    /// Loading has come this far.
    Load(LoadProgress),
    /// The model is loaded.
    Ready(Box<Ready>),
    /// A request is tokenised and matched against the prefix cache.
    Prompt(Prompt),
    /// A request's prefill has come this far.
    Prefill(Prefill),
    /// Generated text.
    Token(Token),
    /// A `generate` request has ended; its last event.
    Done(Box<Done>),
    /// A request, a line or the load has failed; a request's last event.
    Error(Failure),
    /// Answers `tokenize`.
    Tokenized(Tokenized),
    /// Answers `detokenize`.
    Detokenized(Detokenized),
    /// Answers `render`.
    Rendered(Rendered),
    /// Answers `cancel`.
    Cancelled(Cancelled),
    /// Answers `ping`.
    Pong(Pong),
    /// Answers `status`.
    Status(Box<Status>),
    /// Answers `cache`.
    Cache(CacheReply),
    /// Scheduler: answers `load`.
    Loaded(Box<Loaded>),
    /// Scheduler: answers `unload`.
    Unloaded(Unloaded),
    /// Scheduler: answers `list`.
    Models(Models),
    /// An event of a type that this version doesn't know. Only reading makes one.
    #[serde(untagged)]
    Unknown(RawEvent),
}

impl Event {
    /// Reads one line, without its line end, dropping the `model` that a scheduler adds; [`Tagged::parse`] keeps it.
    ///
    /// # Errors
    ///
    /// The line is no JSON object with a `type`, or lacks a member that its type needs.
    pub fn parse(line: impl AsRef<[u8]>) -> Result<Self, EventError> {
        Tagged::parse(line).map(|tagged| tagged.event)
    }

    /// The event's `type`.
    pub fn kind(&self) -> &str {
        match self {
            Self::Hello(_) => "hello",
            Self::Load(_) => "load",
            Self::Ready(_) => "ready",
            Self::Prompt(_) => "prompt",
            Self::Prefill(_) => "prefill",
            Self::Token(_) => "token",
            Self::Done(_) => "done",
            Self::Error(_) => "error",
            Self::Tokenized(_) => "tokenized",
            Self::Detokenized(_) => "detokenized",
            Self::Rendered(_) => "rendered",
            Self::Cancelled(_) => "cancelled",
            Self::Pong(_) => "pong",
            Self::Status(_) => "status",
            Self::Cache(_) => "cache",
            Self::Loaded(_) => "loaded",
            Self::Unloaded(_) => "unloaded",
            Self::Models(_) => "models",
            Self::Unknown(raw) => raw.kind(),
        }
    }

    /// The id of the request that the event belongs to.
    pub fn id(&self) -> Option<&str> {
        match self {
            Self::Hello(_) | Self::Load(_) | Self::Ready(_) => None,
            Self::Prompt(event) => Some(&event.id),
            Self::Prefill(event) => Some(&event.id),
            Self::Token(event) => Some(&event.id),
            Self::Done(event) => Some(&event.id),
            Self::Error(event) => event.id.as_deref(),
            Self::Tokenized(event) => Some(&event.id),
            Self::Detokenized(event) => Some(&event.id),
            Self::Rendered(event) => Some(&event.id),
            Self::Cancelled(event) => Some(&event.id),
            Self::Pong(event) => Some(&event.id),
            Self::Status(event) => Some(&event.id),
            Self::Cache(event) => Some(&event.id),
            Self::Loaded(event) => Some(&event.id),
            Self::Unloaded(event) => Some(&event.id),
            Self::Models(event) => Some(&event.id),
            Self::Unknown(raw) => raw.id(),
        }
    }

    /// Whether a request's id is free again after this event. The error that answers a duplicate id ends nothing: the
    /// request that has the id goes on.
    pub fn is_final(&self) -> bool {
        match self {
            Self::Hello(_) | Self::Load(_) | Self::Ready(_) => false,
            Self::Prompt(_) | Self::Prefill(_) | Self::Token(_) | Self::Unknown(_) => false,
            Self::Error(failure) => failure.id.is_some() && !failure.duplicate,
            Self::Done(_)
            | Self::Tokenized(_)
            | Self::Detokenized(_)
            | Self::Rendered(_)
            | Self::Cancelled(_)
            | Self::Pong(_)
            | Self::Status(_)
            | Self::Cache(_)
            | Self::Loaded(_)
            | Self::Unloaded(_)
            | Self::Models(_) => true,
        }
    }
}

/// An event with the model that it comes from, as a scheduler writes it.
#[derive(Debug, Clone, PartialEq)]
pub struct Tagged {
    /// The event.
    pub event: Event,
    /// The model as the host named it; `None` from a runner, and from a scheduler about itself. Not written with `ready`,
    /// whose own `model` is the model's description; a scheduler sends `loaded` in its place.
    pub model: Option<String>,
}

impl Serialize for Tagged {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct WithModel<'a> {
            #[serde(flatten)]
            event: &'a Event,
            model: &'a str,
        }

        match (&self.event, &self.model) {
            (Event::Ready(_), _) | (_, None) => self.event.serialize(serializer),
            (event, Some(model)) => WithModel { event, model }.serialize(serializer),
        }
    }
}

impl Tagged {
    /// Reads one line, without its line end.
    ///
    /// # Errors
    ///
    /// The line is no JSON object with a `type`, or lacks a member that its type needs.
    pub fn parse(line: impl AsRef<[u8]>) -> Result<Self, EventError> {
        RawEvent::parse(line)?.decode()
    }
}

impl From<Event> for Tagged {
    fn from(event: Event) -> Self {
        Self { event, model: None }
    }
}
