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

#[cfg(test)]
mod tests {
    use super::{add_product, add_products, Lane, LANES, ROWS};
    use crate::simd::Isa;

    #[test]
    fn rows_added_together_have_the_bits_of_rows_added_one_by_one() {
        let number = |i: usize| ((i * 2_654_435_761) % 1_000_003) as f64 / 997.0 - 501.0;
        for n_rows in [0, 1, ROWS - 1, ROWS, ROWS + 1, 2 * ROWS, 2 * ROWS + 3] {
            for n in [0, 1, 7, 64, 65] {
                let matrix: Vec<Vec<f64>> =
                    (0..n_rows).map(|i| (0..n).map(|k| number(i * 131 + k)).collect()).collect();
                let rows: Vec<&[f64]> = matrix.iter().map(Vec::as_slice).collect();
                let by: Vec<Lane> =
                    (0..n_rows).map(|i| std::array::from_fn(|r| number(i * LANES + r + 7))).collect();
                let start: Vec<Lane> = (0..n).map(|k| [number(k); LANES]).collect();
                let mut expected = start.clone();
                for (row, by) in rows.iter().zip(&by) {
                    add_product(Isa::PORTABLE, &mut expected, row, by);
                }
                for isa in Isa::available() {
                    let mut found = start.clone();
                    add_products(isa, &mut found, &rows, &by);
                    assert_eq!(found, expected, "{} rows of {n}, {}", n_rows, isa.name());
                }
            }
        }
    }
}
