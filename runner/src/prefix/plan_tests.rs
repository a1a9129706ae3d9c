//! Where restore points are planned in a prompt.

use super::*;
use proptest::prelude::*;

fn offsets(captures: &[Capture]) -> Vec<(usize, PointKind)> {
    captures
        .iter()
        .map(|capture| (capture.offset, capture.kind))
        .collect()
}

fn turns(list: &[(usize, Role)]) -> Vec<Turn> {
    list.iter().map(|&(start, role)| Turn { start, role }).collect()
}

const NO_GRID: Density = Density {
    grid: 0,
    captures: 32,
};

#[test]
fn an_exact_retry_leaves_one_token() {
    let prompt = Prompt {
        tokens: 20,
        ..Prompt::default()
    };
    assert_eq!(
        offsets(&captures(&prompt, 0, None, NO_GRID)),
        [(19, PointKind::PromptEnd)]
    );
    assert_eq!(captures(&prompt, 19, None, NO_GRID), []);
}

#[test]
fn prompts_of_no_or_one_token_capture_nothing() {
    for tokens in [0, 1] {
        assert_eq!(
            captures(
                &Prompt {
                    tokens,
                    ..Prompt::default()
                },
                0,
                Some(0),
                Density::default()
            ),
            []
        );
    }
}

#[test]
fn a_chat_is_captured_where_the_next_turn_may_part() {
    // system | user | assistant (old) | user | assistant (to be filled): the template strips this one's thoughts next time.
    let turns = turns(&[
        (0, Role::System),
        (30, Role::User),
        (50, Role::Assistant),
        (90, Role::User),
        (120, Role::Assistant),
    ]);
    let prompt = Prompt {
        tokens: 125,
        turns: &turns,
        media: &[],
    };
    let expected = [
        (30, PointKind::Shared),
        (50, PointKind::Turn),
        (90, PointKind::Turn),
        (120, PointKind::Answer),
        (124, PointKind::PromptEnd),
    ];
    assert_eq!(offsets(&captures(&prompt, 0, None, NO_GRID)), expected);
    assert_eq!(offsets(&captures(&prompt, 90, None, NO_GRID)), expected[3..]);
}

#[test]
fn an_agent_loop_keeps_the_start_of_its_first_answer_as_the_stripping_point() {
    // All thoughts since the user's last words are dropped at once when the user speaks again.
    let turns = turns(&[
        (0, Role::User),
        (40, Role::Assistant),
        (80, Role::Other),
        (99, Role::Assistant),
    ]);
    let prompt = Prompt {
        tokens: 104,
        turns: &turns,
        media: &[],
    };
    let found = captures(&prompt, 0, None, NO_GRID);
    assert!(found.contains(&Capture {
        offset: 40,
        kind: PointKind::Answer
    }));
    assert!(found.contains(&Capture {
        offset: 99,
        kind: PointKind::Turn
    }));
}

#[test]
fn a_long_raw_prompt_gets_a_grid_that_spares_pictures() {
    // D.3's prompt: a grid point per step and the end, all restorable by a prompt with one more token.
    let media = [100..120, 8000..8400];
    let prompt = Prompt {
        tokens: 20_000,
        turns: &[],
        media: &media,
    };
    let density = Density {
        grid: 8192,
        captures: 32,
    };
    let expected = [
        (8000, PointKind::Grid),
        (16_384, PointKind::Grid),
        (19_999, PointKind::PromptEnd),
    ];
    assert_eq!(offsets(&captures(&prompt, 0, None, density)), expected);
}

#[test]
fn a_divergence_is_captured_and_outranks_the_grid() {
    let prompt = Prompt {
        tokens: 100,
        ..Prompt::default()
    };
    let density = Density {
        grid: 60,
        captures: 32,
    };
    let expected = [(60, PointKind::Divergence), (99, PointKind::PromptEnd)];
    assert_eq!(offsets(&captures(&prompt, 0, Some(60), density)), expected);
    assert_eq!(offsets(&captures(&prompt, 60, Some(60), density)), expected[1..]);
}

#[test]
fn too_many_captures_are_thinned_but_the_telling_ones_stay() {
    let many: Vec<Turn> = (0..200)
        .map(|turn| Turn {
            start: turn * 100,
            role: if turn % 2 == 0 {
                Role::User
            } else {
                Role::Assistant
            },
        })
        .collect();
    let prompt = Prompt {
        tokens: 20_000,
        turns: &many,
        media: &[],
    };
    let found = captures(
        &prompt,
        0,
        None,
        Density {
            grid: 2048,
            captures: 8,
        },
    );
    assert_eq!(found.len(), 8);
    assert_eq!(
        found[7],
        Capture {
            offset: 19_999,
            kind: PointKind::PromptEnd
        }
    );
    assert!(found.contains(&Capture {
        offset: 19_900,
        kind: PointKind::Answer
    }));
}

fn path(count: usize) -> Vec<PathPoint> {
    (1..=count)
        .map(|index| PathPoint {
            offset: index * 100,
            kind: PointKind::Turn,
        })
        .collect()
}

#[test]
fn thinning_leaves_gaps_that_grow_with_the_distance_from_the_end() {
    let points = path(128);
    let gone = removal_order(&points, 12_800);
    let mut left: Vec<usize> = gone[gone.len() - 8..]
        .iter()
        .map(|&index| points[index].offset)
        .collect();
    left.sort_unstable();
    assert_eq!(left, [6400, 9600, 11_200, 12_000, 12_400, 12_600, 12_700, 12_800]);
}

#[test]
fn the_answer_start_is_the_last_to_go() {
    let kinds = [
        PointKind::Shared,
        PointKind::Answer,
        PointKind::Rest,
        PointKind::Answer,
        PointKind::PromptEnd,
        PointKind::Rest,
    ];
    let points: Vec<_> = kinds
        .iter()
        .enumerate()
        .map(|(index, &kind)| PathPoint {
            offset: 10 * (index + 1),
            kind,
        })
        .collect();
    let order = removal_order(&points, 70);
    assert_eq!(order[2..], [4, 0, 5, 3]);
}

#[test]
fn one_state_of_a_close_pair_goes_to_disk() {
    let points = [
        PathPoint {
            offset: 30,
            kind: PointKind::Shared,
        },
        PathPoint {
            offset: 120,
            kind: PointKind::Answer,
        },
        PathPoint {
            offset: 124,
            kind: PointKind::PromptEnd,
        },
        PathPoint {
            offset: 400,
            kind: PointKind::Rest,
        },
    ];
    assert_eq!(lasting(&points, 64), [0, 1, 3]);
    assert_eq!(lasting(&points, 0), [0, 1, 2, 3]);
}

fn kinds() -> impl Strategy<Value = PointKind> {
    prop::sample::select(vec![
        PointKind::Grid,
        PointKind::Rest,
        PointKind::Turn,
        PointKind::Divergence,
        PointKind::PromptEnd,
        PointKind::Answer,
        PointKind::Shared,
    ])
}

proptest! {
    #[test]
    fn removal_order_is_a_permutation(
        steps in prop::collection::vec((1usize..500, kinds()), 0..40),
        tail in 0usize..100,
    ) {
        let mut offset = 0;
        let points: Vec<_> = steps
            .into_iter()
            .map(|(step, kind)| {
                offset += step;
                PathPoint { offset, kind }
            })
            .collect();
        let mut order = removal_order(&points, offset + tail);
        prop_assert_eq!(&order, &removal_order(&points, offset + tail));
        order.sort_unstable();
        prop_assert_eq!(order, (0..points.len()).collect::<Vec<_>>());
    }

    #[test]
    fn every_point_given_up_is_the_cheapest_of_those_left(
        steps in prop::collection::vec((1usize..500, kinds()), 0..24),
        tail in 0usize..100,
    ) {
        let mut offset = 0;
        let points: Vec<_> = steps
            .into_iter()
            .map(|(step, kind)| {
                offset += step;
                PathPoint { offset, kind }
            })
            .collect();
        let end = offset + tail;
        let order = removal_order(&points, end);
        let last_of = |kind| points.iter().rposition(|point| point.kind == kind);
        let newest = [PointKind::PromptEnd, PointKind::Shared, PointKind::Rest, PointKind::Answer].map(last_of);
        let mut left: Vec<usize> = (0..points.len()).collect();
        for &gone in &order[..order.len() - newest.iter().flatten().count()] {
            let loss = |index: usize| {
                let before = left.iter().rev().find(|&&other| other < index);
                let gap = points[index].offset - before.map_or(0, |&other| points[other].offset);
                let weight = match points[index].kind {
                    PointKind::Grid | PointKind::Rest | PointKind::PromptEnd => 1,
                    PointKind::Turn | PointKind::Divergence | PointKind::Answer => 2,
                    PointKind::Shared => 4,
                };
                (gap * weight, end - points[index].offset + 1)
            };
            let (gain, far) = loss(gone);
            for &other in left.iter().filter(|&&other| !newest.contains(&Some(other))) {
                let (others_gain, others_far) = loss(other);
                let ordering = (gain * others_far).cmp(&(others_gain * far)).then(gone.cmp(&other));
                prop_assert!(ordering.is_le(), "{gone} went before {other}");
            }
            left.retain(|&other| other != gone);
        }
    }

    #[test]
    fn captures_are_ordered_and_leave_a_token(
        tokens in 0usize..400,
        restored in 0usize..400,
        parted in prop::option::of(0usize..400),
        starts in prop::collection::btree_set(0usize..400, 0..12),
        grid in 0usize..70,
        most in 1usize..12,
    ) {
        let turns: Vec<_> = starts.into_iter().map(|start| Turn { start, role: Role::User }).collect();
        let prompt = Prompt { tokens, turns: &turns, media: &[100..200, 300..310] };
        let found = captures(&prompt, restored, parted, Density { grid, captures: most });
        prop_assert!(found.len() <= most);
        prop_assert!(found.windows(2).all(|pair| pair[0].offset < pair[1].offset));
        prop_assert!(found.iter().all(|capture| capture.offset > restored && capture.offset < tokens));
        prop_assert_eq!(found.last().map(|last| last.offset), (restored + 1 < tokens).then(|| tokens - 1));
    }
}
