//! Products of packed rows on tiles of 16 x 16 sums.
//!
//! Two tiles of columns on the left and two on the right make four tiles of sums: four loads for four products. The left
//! ones stay in the first-level cache while the right ones of a square of panels pass by. Such a square, its sums and its
//! limbs stay in the second-level cache for all blocks of rows: the products take so little time that nothing else would
//! be fast enough.

use crate::hessian::limbs;
use crate::hessian::packed::{PackedBlock, TILE, TILES};
use crate::hessian::{PANEL, SQUARE};
use crate::simd::{Isa, TileState};

/// Blocks added to the limbs together.
const FUSED: usize = 2;

/// Panels per side of the square that is worked on at a time.
const SIDE: usize = 4;

/// Sums of a square of panels for a few blocks, and of one panel pair more, on whole cache lines.
#[repr(C, align(64))]
struct Sums([f32; (FUSED * SIDE * SIDE + 1) * SQUARE]);

/// Which square a pair of panels belongs to.
pub(super) fn square(&(i, j): &(usize, usize)) -> (usize, usize) {
    (j / SIDE, i / SIDE)
}

/// Adds the products of all blocks to the limbs of panel pairs `(i, j)`, which are in the order of [`square`].
///
/// Never inlined: its sums would be part of every frame of the recursion by which rayon divides the work.
#[inline(never)]
pub(super) fn add(
    pairs: &[(usize, usize)],
    mut hi: &mut [i64],
    mut lo: &mut [i64],
    blocks: &[PackedBlock<'_>],
    isa: Isa,
) {
    let state = TileState::of(isa);
    #[allow(clippy::large_stack_arrays)] // 300 KiB, which a heap would hand out as untouched pages each time
    let mut sums = Sums([0.0; (FUSED * SIDE * SIDE + 1) * SQUARE]);
    for pairs in pairs.chunk_by(|a, b| square(a) == square(b)) {
        let (own_hi, rest_hi) = hi.split_at_mut(pairs.len() * SQUARE);
        let (own_lo, rest_lo) = lo.split_at_mut(pairs.len() * SQUARE);
        (hi, lo) = (rest_hi, rest_lo);
        for fused in blocks.chunks(FUSED) {
            for (b, block) in fused.iter().enumerate() {
                multiply(&state, block, pairs, |n| (n * fused.len() + b) * SQUARE, &mut sums.0);
            }
            let limbs = own_hi.chunks_exact_mut(SQUARE).zip(own_lo.chunks_exact_mut(SQUARE));
            for (sums, (hi, lo)) in sums.0.chunks_exact(fused.len() * SQUARE).zip(limbs) {
                limbs::add(isa, sums, hi, lo);
            }
        }
    }
}

/// Puts the sums of panel pairs of one square, the `n`th of them from `place(n)` on, 48 to a line. Entries below the
/// diagonal go to the last [`SQUARE`] of `sums`.
pub(super) fn multiply(
    state: &TileState,
    block: &PackedBlock<'_>,
    pairs: &[(usize, usize)],
    place: impl Fn(usize) -> usize,
    sums: &mut [f32],
) {
    let spare = sums.len() - SQUARE;
    let mut places = [[spare; SIDE]; SIDE];
    let (mut left, mut right) = (0..0, 0..0);
    for (n, &(i, j)) in pairs.iter().enumerate() {
        places[i % SIDE][j % SIDE] = place(n);
        for (tiles, panel) in [(&mut left, i), (&mut right, j)] {
            let first = if n == 0 { panel } else { panel.min(tiles.start / TILES) };
            *tiles = first * TILES..tiles.end.max((panel + 1) * TILES);
        }
    }
    for ti in left.clone().step_by(2) {
        // An odd tile at the end is multiplied twice, to the same place.
        let rows = [ti, (ti + 1).min(left.end - 1)];
        let a = rows.map(|t| block.tiles(t)[0]);
        for tj in right.clone().step_by(2) {
            let columns = [tj, (tj + 1).min(right.end - 1)];
            if ti / TILES > columns[1] / TILES {
                continue;
            }
            let b = columns.map(|t| block.tiles(t)[1]);
            let at = rows.map(|i| {
                columns.map(|j| {
                    let square = places[i / TILES % SIDE][j / TILES % SIDE];
                    square + i % TILES * TILE * PANEL + j % TILES * TILE
                })
            });
            state.products(a, b, sums, at);
        }
    }
}
