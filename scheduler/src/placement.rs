//! Which models have to go so that another fits.
//!
//! Invariant: a plan never takes more than it needs, takes idle models before busy ones and the least recently used first,
//! and leaves a busy model that has only just been loaded alone, so that two models that don't fit together take turns
//! instead of swapping at every request.

use std::time::{Duration, Instant};

/// A model that holds memory.
#[derive(Debug, Clone)]
pub struct Resident {
    /// The model's key.
    pub key: String,
    /// What it holds: the larger of estimate and own report.
    pub bytes: u64,
    /// No request of it is waiting or running.
    pub idle: bool,
    /// It is on its way out already.
    pub leaving: bool,
    /// It was asked to stay for ever; such a model goes last.
    pub forever: bool,
    /// When its last request ended or arrived.
    pub last_used: Instant,
    /// When it was started.
    pub since: Instant,
}

/// What to do for a model that wants in.
#[derive(Debug, PartialEq, Eq)]
pub enum Plan {
    /// It fits now.
    Admit,
    /// Stop these idle models, then ask again.
    Evict(Vec<String>),
    /// Give these busy models no more requests, so that they become idle.
    Drain(Vec<String>),
    /// Room is being made, or the models in the way may work a while longer: ask again at this time or when something ends.
    Wait(Option<Instant>),
    /// It doesn't fit even alone.
    TooLarge,
}

/// Plans room for `need` bytes within `budget`. Busy models younger than `quantum` are not drained yet.
pub fn plan(need: u64, budget: u64, residents: &[Resident], now: Instant, quantum: Duration) -> Plan {
    if need > budget {
        return Plan::TooLarge;
    }
    let used: u64 = residents.iter().map(|resident| resident.bytes).sum();
    let Some(mut missing) = (used + need).checked_sub(budget).filter(|&missing| missing > 0) else {
        return Plan::Admit;
    };
    let leaving: u64 = residents
        .iter()
        .filter(|resident| resident.leaving)
        .map(|resident| resident.bytes)
        .sum();
    if leaving >= missing {
        return Plan::Wait(None);
    }
    missing -= leaving;

    let mut candidates: Vec<&Resident> = residents.iter().filter(|resident| !resident.leaving).collect();
    candidates.sort_by_key(|resident| (!resident.idle, resident.forever, resident.last_used));
    let mut chosen: Vec<&Resident> = Vec::new();
    for candidate in candidates {
        if missing == 0 {
            break;
        }
        missing = missing.saturating_sub(candidate.bytes);
        chosen.push(candidate);
    }
    // A small model taken early may turn out not to be needed beside a larger one taken later.
    let mut surplus = (leaving + chosen.iter().map(|resident| resident.bytes).sum::<u64>())
        .saturating_sub(used + need - budget);
    let mut at = 0;
    while at < chosen.len() {
        if chosen[at].bytes <= surplus {
            surplus -= chosen[at].bytes;
            chosen.remove(at);
        } else {
            at += 1;
        }
    }

    let (idle, busy): (Vec<&Resident>, Vec<&Resident>) =
        chosen.into_iter().partition(|resident| resident.idle);
    if !idle.is_empty() {
        return Plan::Evict(keys(&idle));
    }
    let (ripe, young): (Vec<&Resident>, Vec<&Resident>) = busy
        .into_iter()
        .partition(|resident| now.saturating_duration_since(resident.since) >= quantum);
    if ripe.is_empty() {
        return Plan::Wait(young.iter().map(|resident| resident.since + quantum).min());
    }
    Plan::Drain(keys(&ripe))
}

fn keys(residents: &[&Resident]) -> Vec<String> {
    residents.iter().map(|resident| resident.key.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const QUANTUM: Duration = Duration::from_secs(2);

    fn resident(now: Instant, key: &str, bytes: u64, idle: bool, age: u64) -> Resident {
        let then = now.checked_sub(Duration::from_secs(age)).unwrap();
        Resident {
            key: key.to_owned(),
            bytes,
            idle,
            leaving: false,
            forever: false,
            last_used: then,
            since: then,
        }
    }

    #[test]
    fn the_least_recently_used_idle_model_goes_first() {
        let now = Instant::now() + Duration::from_secs(1000);
        let residents = [
            resident(now, "new", 4, true, 1),
            resident(now, "old", 4, true, 9),
            resident(now, "busy", 4, false, 99),
        ];
        assert_eq!(
            plan(4, 12, &residents, now, QUANTUM),
            Plan::Evict(vec!["old".to_owned()])
        );
        assert_eq!(plan(4, 16, &residents, now, QUANTUM), Plan::Admit);
        assert_eq!(plan(17, 16, &residents, now, QUANTUM), Plan::TooLarge);
    }

    #[test]
    fn a_model_asked_to_stay_goes_last_among_the_idle() {
        let now = Instant::now() + Duration::from_secs(1000);
        let mut residents = [
            resident(now, "stay", 4, true, 9),
            resident(now, "lru", 4, true, 1),
        ];
        residents[0].forever = true;
        assert_eq!(
            plan(4, 8, &residents, now, QUANTUM),
            Plan::Evict(vec!["lru".to_owned()])
        );
    }

    #[test]
    fn busy_models_drain_only_after_their_quantum() {
        let now = Instant::now() + Duration::from_secs(1000);
        let young = [resident(now, "a", 4, false, 0), resident(now, "b", 4, false, 0)];
        assert_eq!(plan(4, 8, &young, now, QUANTUM), Plan::Wait(Some(now + QUANTUM)));
        let ripe = [resident(now, "a", 4, false, 3), resident(now, "b", 4, false, 5)];
        assert_eq!(plan(4, 8, &ripe, now, QUANTUM), Plan::Drain(vec!["b".to_owned()]));
    }

    #[test]
    fn room_on_its_way_is_waited_for() {
        let now = Instant::now() + Duration::from_secs(1000);
        let mut residents = [resident(now, "a", 4, true, 3), resident(now, "b", 4, true, 5)];
        residents[0].leaving = true;
        assert_eq!(plan(4, 8, &residents, now, QUANTUM), Plan::Wait(None));
    }

    #[test]
    fn a_small_model_stays_where_a_larger_one_must_go_anyway() {
        let now = Instant::now() + Duration::from_secs(1000);
        let residents = [
            resident(now, "small", 1, true, 9),
            resident(now, "large", 9, true, 1),
        ];
        assert_eq!(
            plan(9, 10, &residents, now, QUANTUM),
            Plan::Evict(vec!["large".to_owned()])
        );
    }

    proptest! {
        #[test]
        fn evicting_what_a_plan_names_always_leads_to_admission(
            sizes in proptest::collection::vec((1_u64..20, any::<bool>(), any::<bool>(), 0_u64..100), 0..8),
            need in 1_u64..20,
            budget in 20_u64..40,
        ) {
            let now = Instant::now() + Duration::from_secs(1000);
            let mut residents: Vec<Resident> = sizes.iter().enumerate().map(|(n, &(bytes, idle, leaving, age))| {
                let mut it = resident(now, &n.to_string(), bytes, idle, age);
                it.leaving = leaving;
                it
            }).collect();
            for _ in 0..20 {
                match plan(need, budget, &residents, now, Duration::ZERO) {
                    Plan::Admit => return Ok(()),
                    Plan::Evict(gone) | Plan::Drain(gone) => residents.retain(|it| !gone.contains(&it.key)),
                    Plan::Wait(_) => residents.retain(|it| !it.leaving),
                    Plan::TooLarge => prop_assert!(false, "{need} fits in {budget}"),
                }
            }
            prop_assert!(false, "never admitted");
        }
    }
}
