//! The wire protocol between a host and Lookahead, version 1.0: the messages as types, a line codec, and transcripts.
//! This page and the types' own documentation are the format's reference. There is no I/O policy, no thread and no model
//! in this crate.
//!
//! A host starts a **runner** (one model) or the **scheduler** (many) as a child process, writes requests to its standard
//! input and reads events from its standard output. Both speak the same protocol; [what differs](#the-scheduler) is below.
//!
//! # Framing
//!
//! One JSON object per line, UTF-8, ended by `\n`; a `\r` before it is ignored, and so are blank lines. A last line
//! without a line end counts as a line. Standard output carries events only; logs go to standard error.
//!
//! Lines may be long (images travel as base64). A line of more than 268435456 bytes, or what `--max-line-bytes` says,
//! is discarded without being kept and answered with `line_too_long`. Whatever a host sends, only `shutdown`, the end of
//! the input and signals end the program.
//!
//! [`LineReader`] and [`LineWriter`] do this over anything that reads and writes.
//!
//! # Requests
//!
//! ```json
//! {"type":"generate","id":"a1","prompt":"Once upon a time"}
//! {"type":"generate","id":"a2","messages":[{"role":"user","content":"Hi"}],"options":{"num_predict":64,"temperature":0.5}}
//! {"type":"cancel","id":"c1","target":"a1"}
//! {"type":"tokenize","id":"t1","text":"Hello"}
//! {"type":"detokenize","id":"t2","tokens":[9419,11]}
//! {"type":"render","id":"r1","messages":[{"role":"user","content":"Hi"}],"think":false}
//! {"type":"status","id":"s1"}
//! {"type":"cache","id":"k1","action":"clear"}
//! {"type":"ping","id":"p1"}
//! {"type":"shutdown"}
//! ```
//!
//! Requests are read **strictly** ([`Request::parse`]): a field that a request doesn't have is an error and not ignored,
//! so that a misspelt option can't pass for a default. `null` is a value of the wrong type like any other, except for
//! `format` (and for a message's `content`, see below). Where an object has a name twice, the last one counts. Integers are
//! written without a fraction; a number that is computed with must be finite as a 32-bit float.
//!
//! Every request but `shutdown` has an `id`, a string of 1 to 128 bytes of the host's choice, which every event about it
//! carries. It is busy until the request's final event. A request with a busy `id` is refused with `duplicate_id`; that
//! error carries `"duplicate":true`, and the request that has the `id` goes on. `shutdown` accepts an `id` and doesn't use it.
//!
//! ## generate
//!
//! Exactly one of `prompt`, `messages` and `tokens` ([`request::Input`]); `images` belongs to `prompt`, `tools` and
//! `think` belong to `messages`.
//!
//! ```json
//! {"type":"generate","id":"g1","prompt":"<|vision_start|><|image_pad|><|vision_end|>What is this?","images":["iVBORw0KGgo="]}
//! {"type":"generate","id":"g2","tokens":[785,3974],"options":{"num_predict":8,"stop":["\n\n"],"seed":7},"cache":false}
//! {"type":"generate","id":"g3","messages":[{"role":"user","content":[{"type":"text","text":"Read it:"},{"type":"image","data":"iVBORw0KGgo="}]}],"format":"json","progress":true}
//! {"type":"generate","id":"g4","prompt":"def f(","draft":{"mode":"fixed","depth":3,"verify":"coupled"},"logprobs":true,"top_logprobs":5}
//! {"type":"generate","id":"g5","prompt":"Date: ","format":{"regex":"[0-9]{4}-[0-9]{2}-[0-9]{2}"},"draft":{"mode":"auto","max_depth":4}}
//! {"type":"generate","id":"g6","prompt":"A point: ","format":{"type":"object","properties":{"x":{"type":"number"}},"required":["x"]}}
//! ```
//!
//! - A message has a `role`, a `content` that is a string or an array of parts, and any other members that its chat
//!   template knows (`tool_calls`, `name`, …), which pass through. A message with `tool_calls` may have no `content`, or
//!   `null`. Parts are strict: `text` and `image` with just the members shown.
//! - `options` and `draft`: see [`request::Options`] and [`request::DraftOptions`] for ranges and defaults. `depth` belongs
//!   to mode `fixed`, which needs it; `max_depth` holds for every mode. A `seed` is any integer of 64 bits, negative ones
//!   included.
//! - `format`: an object that has a member `grammar` or `regex` is that and nothing else; every other object is a JSON Schema.
//!   Between two tokens of JSON stands nothing, one space, or a new line with at most 32 blanks; a schema's own `x-guidance`
//!   object (llguidance's options, such as `whitespace_flexible`) overrides that.
//! - `top_logprobs` above 0 asks for log-probabilities by itself; together with `"logprobs":false` it is refused.
//! - `images` and the other fields are checked for their type here; what only the model can tell (a picture that can't be
//!   decoded, a schema that can't be compiled, an id outside the vocabulary, an empty prompt) is answered later, with
//!   its own code.
//!
//! ## What is wrong with a line
//!
//! One `error` event, with the `id` where a valid one could be read, whatever else is wrong:
//!
//! | line | `code` | message |
//! |---|---|---|
//! | not UTF-8, not JSON (numbers beyond a double and nesting deeper than 127 included) | `invalid_json` | where |
//! | JSON but not an object; `type` missing or no string; `id` missing or bad | `invalid_request` | what |
//! | unknown `type` | `unknown_type` | the type |
//! | a field that the request doesn't have, at any depth | `unknown_field` | its path, `options.tempratur` say |
//! | a field missing, of the wrong type, out of range, or in contradiction to another | `invalid_request` | its path, `messages[2].content[0].data` say |
//! | longer than the limit | `line_too_long` | both lengths |
//!
//! Unknown fields of an object are reported before its other faults. A message never repeats more than 64 characters of
//! what was sent.
//!
//! # Events
//!
//! Hosts **ignore** event fields and event types that they don't know: a minor version only adds. [`Event::parse`] does so,
//! and gives an unknown type as [`Event::Unknown`]. [`RawEvent`] passes events on with everything they have.
//!
//! ```json
//! {"type":"hello","protocol":{"major":1,"minor":0},"program":"lookahead-runner","version":"0.1.0","pid":4711,"backend":"cpu"}
//! {"type":"load","done":1048576,"total":18874368,"stage":"weights"}
//! {"type":"ready","model":{"path":"models/m","architecture":"Qwen3_5ForCausalLM","parameters":4500000,"quantization":null,"context_length":32768,"vocab_size":4096,"vision":false,"eos":[2,5]},"draft":{"active":true,"kind":"mtp","reason":null,"max_depth":16},"memory":{"weights":18000000,"limit":8589934592},"load_duration":81000000}
//! ```
//!
//! `hello` is the first line, sent before loading; `ready` follows when the model is loaded. A load that fails sends
//! `error` with `"id":null` and the process exits with status 1. Requests may be sent from the start: they wait.
//!
//! For one `generate`, in this order: `prompt`, any number of `prefill` (only with `progress`) and `token`, then exactly
//! one of `done` and `error`, and nothing after it.
//!
//! ```json
//! {"type":"prompt","id":"a1","tokens":4,"cached":0}
//! {"type":"prefill","id":"a1","done":4,"total":4}
//! {"type":"token","id":"a1","text":" there","tokens":[1052]}
//! {"type":"token","id":"a1","text":" was","tokens":[572],"logprobs":[{"token":" was","bytes":[32,119,97,115],"logprob":-0.25,"top":[{"token":" was","bytes":[32,119,97,115],"logprob":-0.25}]}]}
//! {"type":"done","id":"a1","done_reason":"stop","stop":"\n\n","total_duration":91000000,"queue_duration":1000000,"prompt_eval_count":4,"cached_count":0,"prompt_eval_duration":20000000,"eval_count":2,"eval_duration":70000000,"draft":{"rounds":2,"proposed":3,"tested":2,"accepted":1,"by_position":[{"tested":1,"accepted":1},{"tested":1,"accepted":0}],"depth":{"0":1,"3":1}}}
//! {"type":"error","id":"a1","code":"out_of_memory","message":"can't allocate 1073741824 bytes","retryable":true}
//! ```
//!
//! - Every generated id is delivered once, in order, in the `token` event whose `text` it contributes to. Joining the texts
//!   gives the same string however the ids were grouped: a host that reads slowly gets fewer and longer events
//!   ([`event::Token::merge`]).
//! - Durations are nanoseconds, sizes bytes, log-probabilities natural; minus infinity is written as -9999.
//! - `draft` counts what drafting did. Three figures go by the name of acceptance rate, so each has a name here
//!   ([`event::DraftStats`]): `accepted_per_proposed`, `accepted_per_tested`, `tokens_per_round`. `tested`, `rounds`,
//!   `by_position` and `depth` are left out where a backend can't know them (llama-server, for some texts); our own runner always
//!   has them.
//!
//! The other requests have one answer each:
//!
//! ```json
//! {"type":"cancelled","id":"c1","target":"a1","found":true}
//! {"type":"tokenized","id":"t1","tokens":[9419]}
//! {"type":"detokenized","id":"t2","text":"Hello,"}
//! {"type":"rendered","id":"r1","prompt":"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"}
//! {"type":"cache","id":"k1","action":"clear","nodes":12,"bytes":5242880}
//! {"type":"pong","id":"p1"}
//! {"type":"status","id":"s1","state":"idle","uptime":60000000000,"running":[],"waiting":0,"requests":{"completed":3,"cancelled":1,"failed":0}}
//! ```
//!
//! `status` has further sections (`memory`, `cache`, `draft`, `models`): see [`event::Status`]. A `cancel` whose target
//! isn't there is answered with `"found":false`, which is no error.
//!
//! [`ErrorCode`] lists the codes. `retryable` says that the same request may succeed later.
//!
//! # The scheduler
//!
//! `generate`, `tokenize`, `detokenize` and `render` take `model` (a directory, a GGUF file or a configured name) and
//! `keep_alive` (seconds that the model stays loaded after its last request, with a fraction or not; -1 for ever, 0
//! unloads at once). `status` and `cache` take `model` too: without it, `status` is about the scheduler itself and
//! `cache` means every loaded model. Everywhere else, and on a runner, both are unknown fields.
//!
//! ```json
//! {"type":"generate","id":"a1","prompt":"Hi","model":"qwen","keep_alive":600}
//! {"type":"load","id":"l1","model":"models/qwen","keep_alive":-1}
//! {"type":"unload","id":"u1","model":"models/qwen"}
//! {"type":"list","id":"m1"}
//! {"type":"status","id":"s2","model":"qwen"}
//! ```
//!
//! Events about a model carry `model` as the host named it ([`Tagged`]); that includes the runners' `load` events. A
//! runner's `hello` and `ready` are not passed on: `loaded` says what `ready` did, under `info` instead of `model`. The
//! scheduler's own `hello` has `"program":"lookahead"` and no `backend`.
//!
//! ```json
//! {"type":"hello","protocol":{"major":1,"minor":0},"program":"lookahead","version":"0.1.0","pid":4712}
//! {"type":"load","done":0,"total":18874368,"stage":"weights","model":"qwen"}
//! {"type":"token","id":"a1","text":"Hello","tokens":[9419],"model":"qwen"}
//! {"type":"loaded","id":"l1","load_duration":0,"model":"qwen"}
//! {"type":"unloaded","id":"u1","found":true,"model":"qwen"}
//! {"type":"models","id":"m1","models":[{"model":"qwen","state":"ready","pid":4713,"memory":25165824,"requests":0,"idle_since":1767225600000,"draft":{"active":true,"kind":"mtp","reason":null,"max_depth":16},"reason":null}]}
//! ```
//!
//! # Transcripts
//!
//! `--record FILE` writes what a program read and wrote; [`transcript`] has the format.
//!
//! # Versions
//!
//! `hello` tells the version. Minor versions only add fields and types to events and requests; anything else is a new
//! major ([`event::ProtocolVersion::understands`]).
//!
//! # Example
//!
//! ```
//! use lookahead_protocol::request::{Generate, Input, Options};
//! use lookahead_protocol::{Event, LineWriter, Request};
//!
//! let mut request = Generate::new("a1", Input::prompt("Count: 1, 2,"));
//! request.options = Options { num_predict: Some(8), temperature: Some(0.0), ..Options::default() };
//! let mut to_runner = LineWriter::new(Vec::new());
//! to_runner.write(&Request::Generate(Box::new(request)))?;
//! assert_eq!(
//!     to_runner.into_inner(),
//!     br#"{"type":"generate","id":"a1","prompt":"Count: 1, 2,","options":{"num_predict":8,"temperature":0.0}}
//! "#
//! );
//!
//! let event = Event::parse(r#"{"type":"token","id":"a1","text":" 3","tokens":[18],"new_in_1_1":true}"#)?;
//! assert_eq!(event.id(), Some("a1"));
//! assert!(!event.is_final());
//!
//! let error = Request::parse(r#"{"type":"generate","id":"a2","prompt":"","options":{"tempratur":1}}"#).unwrap_err();
//! assert_eq!((error.id.as_deref(), error.code.as_str()), (Some("a2"), "unknown_field"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
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
