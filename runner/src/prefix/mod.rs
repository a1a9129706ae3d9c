//! The prefix cache: what was computed for one request and may start another.

pub mod budget;
pub mod cache;
pub mod disk;
pub mod key;
pub mod payload;
pub mod plan;
pub mod stats;
pub mod trie;
mod trie_check;
pub mod trie_view;

#[cfg(test)]
mod fake;
