//! What a judged round leaves: which tokens are recorded, how many rows the caches keep, what the drafter is told.
//!
//! Invariant: the last recorded token is never in the caches. After a round that began with `n` tokens in them they
//! hold `n + recorded.len()` tokens: the one that was current, and all recorded tokens but the last, which is current
//! from then on or ends the generation. So a state behind an end token, a stop string or the end of a budget is never
//! kept, wherever in the round it falls.

/// A round as the one host read tells it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Judged<'a> {
    /// The token that the forward began with; recorded before.
    pub current: u32,
    /// The drafts behind it.
    pub drafts: &'a [u32],
    /// How many of them were accepted, from the first on.
    pub accepted: usize,
    /// The target's own token after those.
    pub next: u32,
}

/// What becomes of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settled<F> {
    /// Tokens to record, in order; at least one. The last one is the new current token.
    pub recorded: Vec<u32>,
    /// Tokens that the caches keep of this round's forward, in slot order: the current one first.
    pub committed: Vec<u32>,
    /// Drafts whose fate is decided: all before them were accepted and none of those ended the generation.
    pub tested: usize,
    /// Drafts accepted among them.
    pub accepted: usize,
    /// Why the generation ends here, if it does.
    pub finish: Option<F>,
}

impl<F> Settled<F> {
    /// The token that the next forward begins with.
    #[must_use]
    pub fn current(&self) -> Option<u32> {
        self.recorded.last().copied()
    }

    /// Rows of the round's forward that stand; the caches roll back to its first slot plus this.
    #[must_use]
    pub fn kept(&self) -> usize {
        self.committed.len()
    }
}

/// Settles a round. `judge` sees each token in the order of generation, end tokens, stop strings and budget being its
/// business, and says whether the generation ends with it; it isn't asked about tokens behind that.
///
/// A terminator among the accepted drafts is the target's own choice, so that it counts as accepted; the drafts behind
/// it are neither accepted nor refused.
pub fn settle<F>(round: &Judged<'_>, mut judge: impl FnMut(u32) -> Option<F>) -> Settled<F> {
    let accepted = round.accepted.min(round.drafts.len());
    let yielded = round.drafts[..accepted]
        .iter()
        .copied()
        .chain(std::iter::once(round.next));
    let mut recorded = Vec::with_capacity(accepted + 1);
    let mut finish = None;
    for token in yielded {
        recorded.push(token);
        finish = judge(token);
        if finish.is_some() {
            break;
        }
    }
    let before_last = &recorded[..recorded.len() - 1];
    let committed = std::iter::once(round.current)
        .chain(before_last.iter().copied())
        .collect();
    let tested = recorded.len().min(round.drafts.len());
    let accepted = recorded.len().min(accepted);
    Settled {
        recorded,
        committed,
        tested,
        accepted,
        finish,
    }
}
