//! Which tokens the penalties see: a window over prompt and generated tokens, and its counts on the device.
//!
//! Invariant: `counts` holds the occurrences of every id among exactly the tokens of the window; each commit changes it by the
//! tokens that come and go and never rebuilds it. Drafts are seen by their own rows only and never enter the window.

use std::collections::VecDeque;

use mlx_rs::error::{Exception, Result};
use mlx_rs::Array;

use super::dist::RowHistory;
use super::options::{PenaltyOptions, Window};
use super::{fused, graph};
use crate::mlx::Path;

/// A token of the window.
#[derive(Debug)]
enum Entry {
    Known(u32),
    /// Sampled but not yet read: int32 [1].
    Pending(Array),
}

/// The window and its counts.
#[derive(Debug)]
pub(super) struct History {
    options: PenaltyOptions,
    /// Most tokens in the window.
    limit: usize,
    /// Oldest first. Empty where the window has no limit, since nothing ever leaves it then.
    window: VecDeque<Entry>,
    /// Commits of [`History::commit_pending`] that wait for [`History::confirm`].
    pending: usize,
    counts: Array,
    path: Path,
}

/// The ids inside the vocabulary, as an array; none where there are none.
fn ids(tokens: impl Iterator<Item = u32>, vocab: i32) -> Option<Array> {
    let ids: Vec<i32> = tokens
        .filter_map(|t| i32::try_from(t).ok())
        .filter(|&id| id < vocab)
        .collect();
    (!ids.is_empty()).then(|| Array::from_slice(&ids, &[ids.len() as i32]))
}

impl History {
    /// Starts from a prompt; ids at or beyond `vocab` count nothing.
    pub(super) fn new(options: PenaltyOptions, vocab: usize, prompt: &[u32], path: Path) -> Self {
        let limit = match options.window {
            Window::All => usize::MAX,
            Window::Last(n) => n,
        };
        let seen = &prompt[prompt.len().saturating_sub(limit)..];
        let mut counts = vec![0.0f32; vocab];
        for &token in seen {
            if let Some(count) = counts.get_mut(token as usize) {
                *count += 1.0;
            }
        }
        let window = if limit == usize::MAX {
            VecDeque::new()
        } else {
            seen.iter().copied().map(Entry::Known).collect()
        };
        Self {
            options,
            limit,
            window,
            pending: 0,
            counts: Array::from_slice(&counts, &[vocab as i32]),
            path,
        }
    }

    /// Adds tokens that the host knows.
    pub(super) fn commit(&mut self, tokens: &[u32]) -> Result<()> {
        if tokens.is_empty() {
            return Ok(());
        }
        // Only the last `limit` of a long run can stay.
        let kept = &tokens[tokens.len().saturating_sub(self.limit)..];
        let out = self.push(kept.iter().map(|&t| Entry::Known(t)));
        let come = ids(kept.iter().copied(), self.counts.dim(0));
        self.change(come.as_ref(), out)
    }

    /// Adds one token that is still in the graph, int32 [1]; [`History::confirm`] tells its id later.
    pub(super) fn commit_pending(&mut self, token: &Array) -> Result<()> {
        let out = self.push(std::iter::once(Entry::Pending(token.clone())));
        self.pending += 1;
        self.change(Some(token), out)
    }

    /// Tells the id of the oldest pending token, so that its graph can go.
    pub(super) fn confirm(&mut self, token: u32) {
        let waiting = self
            .window
            .iter()
            .filter(|entry| matches!(entry, Entry::Pending(_)))
            .count();
        let left = waiting < self.pending;
        self.pending = self.pending.saturating_sub(1);
        // A window shorter than the pipeline has pushed the token out already.
        if left {
            return;
        }
        if let Some(entry) = self
            .window
            .iter_mut()
            .find(|entry| matches!(entry, Entry::Pending(_)))
        {
            *entry = Entry::Known(token);
        }
    }

    /// Puts tokens into the window and returns those that it pushes out.
    fn push(&mut self, tokens: impl Iterator<Item = Entry>) -> Vec<Entry> {
        if self.limit == usize::MAX {
            return Vec::new();
        }
        self.window.extend(tokens);
        let over = self.window.len().saturating_sub(self.limit);
        self.window.drain(..over).collect()
    }

    fn change(&mut self, come: Option<&Array>, out: Vec<Entry>) -> Result<()> {
        let known = out
            .iter()
            .filter_map(|e| if let Entry::Known(t) = e { Some(*t) } else { None });
        let known = ids(known, self.counts.dim(0));
        let pending = out
            .iter()
            .filter_map(|e| if let Entry::Pending(a) = e { Some(a) } else { None });
        let go: Vec<&Array> = known.iter().chain(pending).collect();
        if come.is_none() && go.is_empty() {
            return Ok(());
        }
        self.counts = match self.path {
            Path::Cpu => fused::count(&self.counts, come, &go)?,
            _ => graph::count(&self.counts, come, &go)?,
        };
        Ok(())
    }

    /// What rows see that see so many of `drafts` each.
    pub(super) fn rows(&self, drafts: &[Array], ahead: Vec<usize>) -> Result<RowHistory> {
        let furthest = ahead.iter().copied().max().unwrap_or(0);
        let mut oldest = Vec::new();
        for entry in self.window.iter().take(furthest) {
            match entry {
                Entry::Known(token) => oldest.push(*token),
                Entry::Pending(_) => {
                    return Err(Exception::custom(
                        "drafts follow a token that the host hasn't read yet",
                    ));
                }
            }
        }
        Ok(RowHistory {
            options: self.options,
            counts: self.counts.clone(),
            drafts: drafts.to_vec(),
            ahead,
            oldest,
            room: self.limit.saturating_sub(self.window.len()),
        })
    }
}
