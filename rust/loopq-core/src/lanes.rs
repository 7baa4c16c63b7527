//! Eight rows of a weight side by side, so that one entry of a matrix serves all of them.
//!
//! A lane never looks at its neighbours: what becomes of a row does not depend on the rows that share its tile.

use crate::memory::collected;
use crate::weight::Weight;
use crate::Result;

/// Rows of a tile.
pub const LANES: usize = 8;

/// One number for each row of a tile.
pub(crate) type Lane = [f64; LANES];

/// Rows from `first` on, column by column. Lanes without a row hold zeros, which every grid meets exactly.
pub(crate) fn columns_of(w: Weight<'_>, first: usize) -> Result<Vec<Lane>> {
    let (values, dim) = (w.values(), w.dim());
    let live = LANES.min(w.rows() - first);
    let lane = |j: usize| {
        std::array::from_fn(|r| if r < live { f64::from(values[(first + r) * dim + j]) } else { 0.0 })
    };
    collected("rows that are solved together", (0..dim).map(lane))
}
