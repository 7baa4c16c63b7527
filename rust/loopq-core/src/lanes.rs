//! Eight rows of a weight side by side, so that one entry of a matrix serves all of them.
//!
//! A lane never looks at its neighbours: what becomes of a row does not depend on the rows that share its tile.

use crate::simd::per_isa;
use crate::weight::Weight;

/// Rows of a tile.
pub(crate) const LANES: usize = 8;

/// Rows of a matrix that are added at a time.
const ROWS: usize = 8;

/// One number for each row of a tile.
pub(crate) type Lane = [f64; LANES];

/// Rows from `first` on, column by column. Lanes without a row hold zeros, which every grid meets exactly.
pub(crate) fn columns_of(w: Weight<'_>, first: usize) -> Vec<Lane> {
    let (values, dim) = (w.values(), w.dim());
    let live = LANES.min(w.rows() - first);
    (0..dim)
        .map(|j| {
            std::array::from_fn(|r| if r < live { f64::from(values[(first + r) * dim + j]) } else { 0.0 })
        })
        .collect()
}

#[inline(always)]
fn one(to: &mut [Lane], row: &[f64], by: &Lane) {
    for (lanes, &s) in to.iter_mut().zip(row) {
        for r in 0..LANES {
            lanes[r] += s * by[r];
        }
    }
}

#[inline(always)]
fn several(to: &mut [Lane], rows: &[&[f64]], by: &[Lane]) {
    let n = to.len();
    let (blocks, blocks_by) = (rows.chunks_exact(ROWS), by.chunks_exact(ROWS));
    let rest = blocks.remainder().iter().zip(blocks_by.remainder());
    for (rows, by) in blocks.zip(blocks_by) {
        let rows: [&[f64]; ROWS] = std::array::from_fn(|i| &rows[i][..n]);
        for k in 0..n {
            let mut lanes = to[k];
            for i in 0..ROWS {
                for r in 0..LANES {
                    lanes[r] += rows[i][k] * by[i][r];
                }
            }
            to[k] = lanes;
        }
    }
    for (row, by) in rest {
        one(to, row, by);
    }
}

per_isa! {
    /// `to[k] += row[k] * by` for all lanes.
    pub(crate) fn add_product(to: &mut [Lane], row: &[f64], by: &Lane) = one;
}

per_isa! {
    /// `to[k] += rows[i][k] * by[i]` for all lanes, in the order of `i`: the bits of as many calls of `add_product`, with
    /// one load and store of `to` for eight rows.
    pub(crate) fn add_products(to: &mut [Lane], rows: &[&[f64]], by: &[Lane]) = several;
}
