//! Which instructions sum products of bf16 rows: the fastest of those that have been seen to round as the format says.
//!
//! All of them give the same bits by their manuals. Once per process, the processor's results are compared with sums of
//! single-precision chains, on numbers that round, cancel and underflow. Instructions with different results are not
//! used.

use crate::dump::{RowType, Rows};
use crate::hessian::packed::{PackedBlock, RowOrder, GROUP};
use crate::hessian::{tiles, PANEL, SQUARE};
use crate::simd::{Answer, Isa, TileState, MR};

/// The layout for rows of a type, for the best instructions of an instruction set.
pub(super) fn layout(dtype: RowType, isa: Isa) -> RowOrder {
    static TILES: Answer = Answer::unknown();
    static PAIRS: Answer = Answer::unknown();
    if dtype != RowType::Bf16 {
        return RowOrder::Single;
    }
    let agrees = |answer: &Answer, layout| answer.or_find(|| u8::from(agrees(isa, layout))) == 1;
    if isa.has_tiles() && agrees(&TILES, RowOrder::Tiles) {
        RowOrder::Tiles
    } else if isa.has_fast_pairs() && agrees(&PAIRS, RowOrder::Pairs) {
        RowOrder::Pairs
    } else {
        RowOrder::Chains
    }
}

/// Whether products by a layout's instructions are those of chains.
fn agrees(isa: Isa, layout: RowOrder) -> bool {
    let bits = sample();
    let of = |layout: RowOrder| sums(&bits, isa, layout);
    of(layout) == of(RowOrder::Chains)
}

/// All products of the sample's columns.
fn sums(bits: &[u16], isa: Isa, layout: RowOrder) -> Option<Vec<f32>> {
    let rows = Rows::from_bits16(bits, RowType::Bf16, bits.len() / PANEL, PANEL).ok()?;
    let mut scratch = vec![0; layout.n_words(PANEL)];
    let block = PackedBlock::pack(rows, layout, isa, &mut scratch);
    let mut sums = vec![0.0; 2 * SQUARE];
    if layout == RowOrder::Tiles {
        tiles::multiply(&TileState::of(isa), &block, &[(0, 0)], |_| 0, &mut sums);
    } else {
        for (strip, sums) in sums[..SQUARE].chunks_exact_mut(MR * PANEL).enumerate() {
            block.strip(isa, 0, 0, strip * MR, sums);
        }
    }
    sums.truncate(SQUARE);
    Some(sums)
}

/// Rows of a panel. One third of the columns is near one, one third has products at the end of the normal range, and
/// one third has any size, with cancellations, zeros and subnormal numbers.
fn sample() -> Vec<u16> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = |n: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 20) % n) as u16
    };
    let value = |column: usize| {
        let exponent = match column % 3 {
            0 => 120 + next(8),
            1 => [0, 60, 63, 64, 66][usize::from(next(5))] + next(3),
            _ => 30 + next(120),
        };
        let fraction = if next(4) == 0 { 0 } else { next(128) };
        next(2) << 15 | exponent << 7 | fraction
    };
    (0..3 * GROUP * PANEL).map(|i| i % PANEL).map(value).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::{agrees, layout, sums, RowOrder};
    use crate::dump::RowType;
    use crate::hessian::PANEL;
    use crate::simd::Isa;

    /// Sums of products of two given columns; the rest of the panel is zero.
    fn product(rows: &[[u16; 2]], isa: Isa, layout: RowOrder) -> f32 {
        let mut bits = vec![0; rows.len() * PANEL];
        for (row, pair) in bits.chunks_exact_mut(PANEL).zip(rows) {
            (row[3], row[40]) = (pair[0], pair[1]);
        }
        sums(&bits, isa, layout).unwrap()[3 * PANEL + 40]
    }

    /// `2^exponent`.
    fn power(exponent: i32) -> u16 {
        ((exponent + 127) as u16) << 7
    }

    #[test]
    fn every_layout_meets_the_end_of_the_normal_range_as_defined() {
        let negative = |bits: u16| bits | 0x8000;
        let least = f32::MIN_POSITIVE;
        // 2^-126 - 2^-150 has 24 bits and lies below the normal numbers: zero. 2^-126 - 2^-152 rounds to 2^-126.
        let below = vec![[power(-63), power(-63)], [power(-75), negative(power(-75))]];
        let above = vec![[power(-63), power(-63)], [power(-76), negative(power(-76))]];
        // Each product of 2^-127 counts as zero. An instruction that kept them would add two to 2^-126.
        let halves = vec![[power(-63), power(-64)]; 2];
        // The same in two chains: the sum 2^-127 of 2^-126 * 3/2 and -2^-126 is zero too.
        let mut apart = vec![[0, 0]; 17];
        (apart[0], apart[16]) = ([power(-63), power(-63) | 0x40], [power(-63), negative(power(-63))]);
        // A subnormal number counts as zero with any factor.
        let subnormal = vec![[0x7f, power(20)], [power(0), power(0)]];
        let ends = [(below, 0.0), (above, least), (halves, 0.0), (apart, 0.0), (subnormal, 1.0)];
        for isa in Isa::available() {
            let pairs = isa.has_pairs().then_some(RowOrder::Pairs);
            let tiles = isa.has_tiles().then_some(RowOrder::Tiles);
            for layout in [Some(RowOrder::Chains), pairs, tiles].into_iter().flatten() {
                for (n, (rows, expected)) in ends.iter().enumerate() {
                    let got = product(rows, isa, layout);
                    assert_eq!(got, *expected, "{} {layout:?} {n}", isa.name());
                }
            }
        }
    }

    #[test]
    fn bf16_instructions_agree_with_chains_and_are_used_if_fast() {
        for isa in Isa::available() {
            assert!(!isa.has_pairs() || agrees(isa, RowOrder::Pairs), "{}", isa.name());
            assert!(!isa.has_tiles() || agrees(isa, RowOrder::Tiles), "{}", isa.name());
            let expected = match isa {
                isa if isa.has_tiles() => RowOrder::Tiles,
                isa if isa.has_fast_pairs() => RowOrder::Pairs,
                _ => RowOrder::Chains,
            };
            assert_eq!(layout(RowType::Bf16, isa), expected, "{}", isa.name());
        }
    }
}
