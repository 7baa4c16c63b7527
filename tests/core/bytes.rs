//! Any bytes to every parser: an error or a result, never a panic. `tests/fuzz` searches further, by coverage.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, unreachable_pub)]

// The fuzz targets take the same file.
#[allow(unreachable_pub)]
#[path = "../fuzz/parsers.rs"]
mod parsers;

use std::{env, iter};

use parsers::PARSERS;
use proptest::collection::vec;
use proptest::prelude::*;

/// Inputs that are right, to start from.
fn seed(parser: &str) -> Vec<u8> {
    let fill = |head: &[u8], n: usize| head.iter().copied().chain((0..n).map(|i| (i * 37) as u8)).collect();
    match parser {
        "dense" => fill(&[2, 40, 4], 40),
        "marlin" => fill(&[128, 64], 4096),
        "state" => [&[1u8, 3, 2, 0, 4, 2, 5, 6, 1, 2][..], &[0; 8 * 24]].concat(),
        "w4" => fill(&[16, 64], 512),
        _ => {
            let header = br#"{"x/0":{"dtype":"F16","shape":[4,3],"data_offsets":[0,24]}}"#;
            [&[3, 1][..], header, &[0; 25]].concat()
        }
    }
}

/// Change some bytes, cut, or repeat a part.
fn mutate(data: &mut Vec<u8>, next: &mut impl FnMut() -> u64) {
    for _ in 0..=next() % 4 {
        let at = next() as usize % (data.len() + 1);
        match (next() % 6, data.get_mut(at)) {
            (0, Some(byte)) => *byte = next() as u8,
            (1, Some(byte)) => *byte ^= 1 << (next() % 8),
            (2, Some(byte)) => *byte = [0, 1, 127, 128, 252, 253, 254, 255, b'"', b'0'][next() as usize % 10],
            (3, _) => data.truncate(at),
            (4, _) => data.insert(at, next() as u8),
            _ => data.extend_from_within(at..at + (data.len() - at).min(next() as usize % 16)),
        }
    }
}

#[test]
fn seeds_and_their_neighbours() {
    search(2_000);
}

/// As many inputs for every parser as `LOOPQ_FUZZ` says, a million by default: `make soak`.
#[test]
#[ignore = "minutes"]
fn a_million_inputs() {
    search(env::var("LOOPQ_FUZZ").map_or(1_000_000, |n| n.parse().unwrap()));
}

fn search(n_inputs: usize) {
    for (name, parser) in PARSERS {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state >> 11
        };
        for _ in 0..n_inputs {
            let mut data = match next() % 8 {
                0 => iter::repeat_with(|| next() as u8).take(64).collect(),
                _ => seed(name),
            };
            mutate(&mut data, &mut next);
            parser(&data);
        }
        println!("{name}: {n_inputs} inputs, 0 panics");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]
    #[test]
    fn any_bytes(data in vec(any::<u8>(), 0..300)) {
        for (_, parser) in PARSERS {
            parser(&data);
        }
    }
}
